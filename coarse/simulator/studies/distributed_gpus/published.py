"""Tables of the dissertation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coarse.simulator.studies.distributed_gpus.machines import EXTOLL, SANDY_BRIDGE, Machine
from coarse.simulator.studies.distributed_gpus.transfers import Memory

TABLE_3_1: Sequence[tuple[str, Machine, Mapping[tuple[Memory, Memory], float]]] = (
    (
        "Table 3.1a",
        SANDY_BRIDGE,
        {
            (Memory.HOST, Memory.HOST): 3212,
            (Memory.HOST, Memory.GPU): 3212,
            (Memory.GPU, Memory.HOST): 968,
            (Memory.GPU, Memory.GPU): 969,
        },
    ),
    (
        "Table 3.1b",
        EXTOLL,
        {
            (Memory.HOST, Memory.HOST): 892,
            (Memory.HOST, Memory.GPU): 892,
            (Memory.GPU, Memory.HOST): 769,
            (Memory.GPU, Memory.GPU): 767,
        },
    ),
)
"""Maximal bandwidth in MB/s by source and target."""

TABLE_5_4: Mapping[str, Sequence[float]] = {
    "post, queues on the host": (12.46, 11.86, 11.83, 9.50, 7.52),
    "poll, queues on the host": (15.69, 10.70, 10.70, 10.70, 5.45),
    "post, queues on the GPU": (10.66, 10.86, 10.56, 8.80, 7.00),
    "poll, queues on the GPU": (8.27, 8.27, 8.20, 8.20, 3.12),
}
"""Microseconds of five versions, in this order.

The first has no optimisation. Each further one adds one: shared memory, static calculation, no stamping, no handling.
"""

TABLE_6_1_VALUES = (1, 16, 64, 256, 1024, 4096)
TABLE_6_1: Mapping[str, Sequence[int]] = {
    "consecutive writes": (1, 1, 4, 16, 64, 256),
    "consecutive reads": (1, 1, 4, 16, 64, 256),
    "non-consecutive writes": (1, 16, 64, 256, 1024, 4096),
    "non-consecutive reads": (1, 2, 8, 32, 128, 512),
}
"""Incoming requests by number of 4-byte values."""

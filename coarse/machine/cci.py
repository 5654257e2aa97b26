"""Bandwidth of CCI memory by access method, and the links of DENSE (COARSE paper, III-B and V-B, Figures 3, 13, 14).

The paper measures a prototype of two FPGAs. Its text gives ratios between methods, not GB/s: GPU direct copies fill
the serial bus, and loads and stores are slower by a factor. The figures themselves are not in the text, so values
that the text does not give are missing here too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coarse.machine.description import Figure
from coarse.machine.links import Bucket, LinkTable, Path

READ, WRITE = "read", "write"
"""Directions of an access, as seen from the processor."""

LOAD_STORE, GPU_INDIRECT, GPU_DIRECT, DMA = "load/store", "GPU indirect", "GPU direct", "DMA"
METHODS = (LOAD_STORE, GPU_INDIRECT, GPU_DIRECT, DMA)
"""Loads and stores of the host (the paper calls them CCI), a copy through host memory, peer-to-peer, a DMA engine."""

FIGURE_3 = {
    READ: Figure(value=17, source="COARSE II-C, Fig 3: GPU direct over load/store, reads", kind="measured"),
    WRITE: Figure(value=4, source="COARSE II-C, Fig 3: GPU direct over load/store, writes", kind="measured"),
}
LEAST_RATIO = {
    READ: Figure(value=9, source="COARSE V-B, Fig 13a: GPU direct is 9 to 17 times as fast", kind="measured"),
    WRITE: Figure(
        value=1.25, source="COARSE V-B, Fig 13b: GPU direct is 1.25 to 4 times as fast", kind="measured"
    ),
}
FULL_FROM_BYTES = Figure(
    value=2 << 20, source="COARSE V-B, Fig 14: DMA is at its maximum from 2 MB on", kind="measured"
)
_FULL = 0.9  # share of the maximum that counts as full, as in profiler/shard_size.py
_HALF_BYTES = FULL_FROM_BYTES.value * (1 - _FULL) / _FULL

LINE_BYTES = 64
MESSAGE_BYTES = Figure(
    value=16, source="CXL 2.0: a message takes a slot of 16 bytes in a flit", kind="recalled"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A bandwidth of which only limits are known, as a share of the serial bus's.

    Args:
        low, high: Limits, 0 < low <= high <= 1.
        source: Where they come from.
    """

    low: float
    high: float
    source: str


def share_of_bus(method: str, direction: str, nbytes: int) -> Band | None:
    """Bandwidth of one access of `nbytes` as a share of the serial bus's bandwidth.

    GPU direct and DMA follow `n / (n + n_half)`, with 90% at 2 MiB: a curve through the one point of Figure 14 that
    the text gives. Loads are stable at 1/17 under all sizes (V-B). GPU indirect reads are as fast as loads. Stores
    lie between 1/4 and 1/1.25 of GPU direct.

    Returns:
        None where the paper's text gives nothing: writes by GPU indirect.

    Raises:
        ValueError: If the method or direction is unknown, or `nbytes` is not positive.
    """
    if method not in METHODS or direction not in (READ, WRITE) or nbytes < 1:
        raise ValueError(f"no access of {nbytes} bytes by {method!r}, {direction!r}")
    direct = nbytes / (nbytes + _HALF_BYTES)
    if method in (GPU_DIRECT, DMA):
        return Band(low=direct, high=direct, source=FULL_FROM_BYTES.source)
    if direction == READ:
        stable = min(direct, 1 / FIGURE_3[READ].value)
        return Band(low=stable, high=stable, source=FIGURE_3[READ].source)
    if method == GPU_INDIRECT:
        return None
    return Band(
        low=direct / FIGURE_3[WRITE].value,
        high=direct / LEAST_RATIO[WRITE].value,
        source=LEAST_RATIO[WRITE].source,
    )


# ---- DENSE ----


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStore:
    """Speed of a worker's loads and stores to CCI memory.

    Args:
        read_ratio, write_ratio: Bandwidth of the link over that of loads and of stores, at least 1.

    Raises:
        ValueError: If a ratio is below 1 or not finite.
    """

    read_ratio: float = FIGURE_3[READ].value
    write_ratio: float = FIGURE_3[WRITE].value

    def __post_init__(self) -> None:
        for name, ratio in (("read", self.read_ratio), ("write", self.write_ratio)):
            if not (math.isfinite(ratio) and ratio >= 1):
                raise ValueError(
                    f"a {name} ratio of {ratio:g}: loads and stores are not faster than their link"
                )

    @classmethod
    def parse(cls, text: str) -> LoadStore:
        """Reads "17,4": the ratio of reads, and that of writes.

        Raises:
            ValueError: If it is anything else.
        """
        parts = text.split(",")
        try:
            read, write = map(float, parts)
        except ValueError:
            raise ValueError(f"{text!r} is not the ratios of reads and writes, such as 17,4") from None
        return cls(read_ratio=read, write_ratio=write)


def coherence_factor(num_sharers: int) -> float:
    """Bytes that cross a link for each byte stored or loaded, when `num_sharers` processors share every line.

    A store to a line invalidates it in the caches of all other sharers: a message to each, and its answer. Every
    sharer stores to every line once a step, so each link carries `num_sharers - 1` messages per line and direction.

    Raises:
        ValueError: If there is no sharer.
    """
    if num_sharers < 1:
        raise ValueError(f"{num_sharers} sharers of a line")
    return 1 + (num_sharers - 1) * MESSAGE_BYTES.value / LINE_BYTES


def dense_links(links: LinkTable, access: LoadStore) -> LinkTable:
    """The links of DENSE (III-B): workers load from and store to one memory device through CCI.

    Each path between a worker and the memory device gets a bucket of its own for stores or loads. Its other buckets
    carry coherence messages too. A worker's cache keeps loaded values until the next update, so each step loads
    every parameter once.

    Raises:
        ValueError: If there are several memory devices.
    """
    if links.num_devices != 1:
        raise ValueError(
            f"DENSE has one memory device, but {links.num_devices} were asked for: set COARSE_MEMORY_DEVICES=1"
        )
    device, factor = links.device(0), coherence_factor(links.num_workers)
    buckets, paths = list(links.buckets), [list(row) for row in links.paths]
    shared: dict[int, int] = {}
    for worker in range(links.num_workers):
        name = links.endpoint_name(worker)
        for source, target, ratio, what in (
            (worker, device, access.write_ratio, "stores"),
            (device, worker, access.read_ratio, "loads"),
        ):
            path = links.path(source, target)
            own = Bucket(
                name=f"{name} CCI {what}",
                gbytes_per_s=links.bandwidth_gbytes_per_s(source, target) / ratio,
            )
            numbers = [_with_coherence(buckets, shared, number, factor) for number in path.buckets]
            buckets.append(own)
            paths[source][target] = Path(latency_us=path.latency_us, buckets=(*numbers, len(buckets) - 1))
    return LinkTable(
        machine=links.machine,
        num_workers=links.num_workers,
        num_devices=1,
        buckets=tuple(buckets),
        paths=tuple(map(tuple, paths)),
    )


def _with_coherence(buckets: list[Bucket], shared: dict[int, int], number: int, factor: float) -> int:
    """The bucket `number` without the capacity that coherence messages take."""
    if number not in shared:
        shared[number] = len(buckets)
        bucket = buckets[number]
        buckets.append(
            Bucket(name=f"{bucket.name} beside coherence", gbytes_per_s=bucket.gbytes_per_s / factor)
        )
    return shared[number]

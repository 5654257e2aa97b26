"""Protocols step by step, and results without a counterpart in the dissertation."""

from __future__ import annotations

from coarse.profiler.alpha_beta import AlphaBeta
from coarse.profiler.switchover import predict_all_to_all_crossing, predict_crossing
from coarse.simulator.studies.distributed_gpus import collectives, stencil, transfers
from coarse.simulator.studies.distributed_gpus.last_block import Gpu
from coarse.simulator.studies.distributed_gpus.machines import (
    BLOCKING_EVENT_US,
    DEVICE_SYNC_US,
    EVENT_US,
    IVY_BRIDGE,
    PUT_US,
    SANDY_BRIDGE,
    STAGING_US,
    STREAM_SYNC_US,
)
from coarse.simulator.studies.distributed_gpus.notifications import Queues, Segment
from coarse.simulator.studies.study import StateTable

_GPUS = 8


def notification_trace() -> StateTable:
    """Data and flag on one queue, and on two."""
    rows: list[tuple[str, ...]] = []
    for what, flag_queue in (("one queue", 0), ("two queues", 1)):
        segment = Segment()
        queues = Queues(segment)
        queues.write(0, "gradient", queue=0)
        queues.notify(7, 1, queue=flag_queue)
        while queues.deliver(1):
            rows.append((what, str(segment.data.get(0, "nothing")), str(segment.flags.get(7, 0))))
    return StateTable(
        title="Put and notify: what the target sees",
        columns=("flag on", "data", "flag"),
        rows=rows,
    )


def last_block_trace() -> StateTable:
    """Two blocks of a GPU: the last one sends."""
    one, other = Gpu(num_blocks=2), Gpu(num_blocks=2)
    rows: list[tuple[str, ...]] = []
    for block in range(2):
        for step in one.block(0, other):
            rows.append((f"block {block}", step, str(one.counter), str(other.boundaries), str(other.flags)))
    return StateTable(
        title="The last block that arrives sends",
        columns=("who", "step", "counter", "neighbour's boundaries", "neighbour's flags"),
        rows=rows,
    )


def synchronisation_table() -> StateTable:
    """Ways in which the host waits for its GPU."""
    methods = {
        "device": DEVICE_SYNC_US,
        "stream": STREAM_SYNC_US,
        "event": EVENT_US,
        "blocking event": BLOCKING_EVENT_US,
    }
    return StateTable(
        title="Himeno on 16 GPUs by GASPI: speed-up by the way in which the host waits",
        columns=("synchronisation", "us (Table 4.1)", "M", "L"),
        rows=[
            (
                name,
                f"{each.value:g}",
                *(
                    f"{stencil.strong_speedup(grid, 16, synchronisation_us=each.value):.2f}"
                    for grid in (stencil.SIZE_M, stencil.SIZE_L)
                ),
            )
            for name, each in methods.items()
        ],
    )


def switch_table() -> StateTable:
    """Compared with the runtime's own formula, with latency and bandwidth of one path."""
    rows: list[tuple[str, ...]] = []
    for machine in (SANDY_BRIDGE, IVY_BRIDGE):
        direct = AlphaBeta(alpha_us=PUT_US.value, beta_gbytes_per_s=machine.peer_read.value / 1000)
        staged = AlphaBeta(
            alpha_us=PUT_US.value + STAGING_US.value,
            beta_gbytes_per_s=1e-3 / (1 / machine.link.value + 1 / machine.copy.value),
        )
        formula = predict_crossing(direct, staged)
        what = f"write from GPU to GPU, {machine.name}"
        rows.append((what, "direct", "staged", str(transfers.switch_bytes(machine)), f"{formula:.0f}"))
        what = f"all-to-all of {_GPUS} GPUs, {machine.name}"
        rows.append((what, "direct", "staged", str(transfers.all_to_all_switch_bytes(machine, _GPUS)), ""))
    for gpus in (4, 8, 16):
        path = AlphaBeta(
            alpha_us=collectives.barrier_us(gpus), beta_gbytes_per_s=collectives.store_mbytes_per_s(1) / 1000
        )
        formula = predict_all_to_all_crossing(path, gpus)
        what = f"all-reduce of {gpus} GPUs"
        rows.append((what, "all-gather", "all-to-all", str(collectives.switch_bytes(gpus)), f"{formula:.0f}"))
    return StateTable(
        title="Sizes at which the faster way changes, and coarse/profiler/switchover.py",
        columns=("what", "below", "above", "simulated, bytes", "formula, bytes"),
        rows=rows,
    )

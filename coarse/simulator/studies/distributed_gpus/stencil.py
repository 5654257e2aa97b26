"""The Himeno benchmark on several GPUs: computation overlaps with the exchange of boundaries (sections 4.5, 5.8)."""

from __future__ import annotations

from dataclasses import dataclass

from coarse.simulator.events.engine import simulate
from coarse.simulator.events.tasks import Task
from coarse.simulator.studies.distributed_gpus.machines import (
    EVENT_US,
    GPU_WATT,
    HIMENO_GFLOPS,
    HYBRID_CPU_WATT,
    HYBRID_DRAM_WATT,
    IVY_BRIDGE,
    MPI_US,
    PUT_US,
    SLEEPING_CPU_WATT,
    SLEEPING_DRAM_WATT,
    STAGING_US,
    STREAM_OVERHEAD,
)
from coarse.simulator.studies.distributed_gpus.transfers import KIB, MB, US

_MEGA, _GIGA = 1e6, 1e9
_GPUS_OF_A_NODE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A problem of Table 4.2."""

    name: str
    mflop: float
    boundary_bytes: int


SIZE_M = Grid(name="M", mflop=137.1, boundary_bytes=64 * KIB)
SIZE_L = Grid(name="L", mflop=1118.7, boundary_bytes=256 * KIB)


def iteration_us(
    grid: Grid, gpus: int, *, has_mpi: bool = False, synchronisation_us: float = EVENT_US.value
) -> float:
    """Two halves: one part of the grid is computed while the other part's boundary travels.

    Four GPUs share a node's network interface. One GPU needs no exchange, and no synchronisation between its kernels.
    """
    compute_us = grid.mflop * _MEGA / gpus / 2 / (HIMENO_GFLOPS.value * _GIGA) / US
    if gpus == 1:
        return 2 * compute_us
    tasks: list[Task] = []
    for gpu in range(gpus):
        node = gpu // _GPUS_OF_A_NODE
        kernel = Task(name=f"kernel {gpu}", overhead_s=compute_us * US)
        event = Task(name=f"event {gpu}", after=(kernel.name,), overhead_s=synchronisation_us * US)
        tasks += [kernel, event]
        if gpu == gpus - 1:
            continue
        target_node = (gpu + 1) // _GPUS_OF_A_NODE
        copy = Task(
            name=f"copy {gpu}",
            overhead_s=STAGING_US.value * US,
            nbytes=grid.boundary_bytes,
            usage=((f"copy {gpu}", 1.0),),
        )
        send = Task(
            name=f"send {gpu}",
            after=(copy.name,),
            nbytes=grid.boundary_bytes,
            usage=((f"out {node}", 1.0), (f"in {target_node}", 1.0)),
            latency_s=(PUT_US.value + (MPI_US.value if has_mpi else 0.0)) * US,
        )
        tasks += [copy, send]
    return 2 * simulate(tasks, _capacities(gpus)).end_s / US


def _capacities(gpus: int) -> dict[str, float]:
    links = {
        f"{way} {node}": IVY_BRIDGE.link.value * MB
        for way in ("in", "out")
        for node in range(-(-gpus // _GPUS_OF_A_NODE))
    }
    return links | {f"copy {gpu}": IVY_BRIDGE.copy.value * MB for gpu in range(gpus)}


def strong_speedup(
    grid: Grid, gpus: int, *, has_mpi: bool = False, synchronisation_us: float = EVENT_US.value
) -> float:
    """Over one GPU."""
    return iteration_us(grid, 1) / iteration_us(
        grid, gpus, has_mpi=has_mpi, synchronisation_us=synchronisation_us
    )


def stream_performance(work: float) -> float:
    """Of GPU-controlled communication to the hybrid, for `work` times the computation of the smallest grid.

    Posts and polls do not overlap with kernels of their stream, and take as long for every grid with that boundary.
    """
    return 1 / (1 + STREAM_OVERHEAD.value / work)


def efficiency_gain(performance: float) -> float:
    """Energy efficiency of GPU-controlled communication over the hybrid, less 1: the CPU sleeps, the GPU works on."""
    hybrid = GPU_WATT.value + HYBRID_CPU_WATT.value + HYBRID_DRAM_WATT.value
    sleeping = GPU_WATT.value + SLEEPING_CPU_WATT.value + SLEEPING_DRAM_WATT.value
    return performance * hybrid / sleeping - 1

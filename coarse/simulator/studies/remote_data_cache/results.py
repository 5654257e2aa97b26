"""Everything that the study simulates, once: the numbers behind comparisons, claims and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coarse.simulator.studies.remote_data_cache.accesses.sharing import Sharing, sharing_of
from coarse.simulator.studies.remote_data_cache.accesses.workloads import WORKLOADS, Workload
from coarse.simulator.studies.remote_data_cache.host_memory import waiting_seconds
from coarse.simulator.studies.remote_data_cache.parameters import GIB, Machine
from coarse.simulator.studies.remote_data_cache.systems import (
    HARDWARE,
    IDEAL,
    NO_COHERENCE,
    NUMA,
    REPLICATION,
    SIZES_GIB,
    SOFTWARE,
    SYSTEMS,
    WRITES_BACK,
    SimulatedWorkload,
    geometric_mean,
    sized,
)
from coarse.simulator.studies.study import Progress

LINKS_GBYTES_PER_S: Sequence[float] = (32, 64, 128, 256)
"""Links between GPUs of Fig 14; the text names the first two."""

LINK_SYSTEMS = (NUMA, REPLICATION, HARDWARE, IDEAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadResult:
    """A workload's figures.

    Args:
        speedups: Over one GPU, by system.
        remote_shares: Part of the memory accesses that another GPU serves, by system.
        link_speedups: By system and link in GB/s.
        slowdowns: Speed with part of its pages in the host's memory, relative to none, by cache size in GiB.
        pages, lines: How its pages and lines are shared.
        link_bytes: Between GPUs, by system.
        sent_writes: Writes that homes receive, by system.
        broadcast_share: Part of the writes for which a home sends invalidations.
    """

    speedups: Mapping[str, float]
    remote_shares: Mapping[str, float]
    link_speedups: Mapping[tuple[str, float], float]
    slowdowns: Mapping[float, float]
    pages: Sharing
    lines: Sharing
    link_bytes: Mapping[str, float]
    sent_writes: Mapping[str, int]
    broadcast_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of all workloads by name."""

    by_name: Mapping[str, WorkloadResult]

    def speedup(self, system: str) -> float:
        """Geometric mean over workloads."""
        return geometric_mean([each.speedups[system] for each in self.by_name.values()])

    def link_speedup(self, system: str, gbytes_per_s: float) -> float:
        """Geometric mean over workloads with another link."""
        return geometric_mean([each.link_speedups[system, gbytes_per_s] for each in self.by_name.values()])

    def slowdown(self, gib: float) -> float:
        """Geometric mean over workloads with part of the pages in the host's memory."""
        return geometric_mean([each.slowdowns[gib] for each in self.by_name.values()])

    def remote_share(self, system: str) -> float:
        """Mean over workloads."""
        return self.mean([each.remote_shares[system] for each in self.by_name.values()])

    def relative(self, name: str, system: str, other: str = IDEAL) -> float:
        """Speed of a workload on one system over that on another."""
        return self.by_name[name].speedups[system] / self.by_name[name].speedups[other]

    @staticmethod
    def mean(values: Sequence[float]) -> float:
        """Arithmetic mean."""
        return float(np.mean(values))


def simulate_all(progress: Progress, workloads: Sequence[Workload] = WORKLOADS) -> Results:
    """Runs workloads on all systems."""
    by_name = {}
    for place, workload in enumerate(workloads):
        progress(f"{workload.name} on {len(SYSTEMS)} systems ({place + 1} of {len(workloads)})")
        by_name[workload.name] = simulate_workload(workload, Machine())
    return Results(by_name=by_name)


def simulate_workload(workload: Workload, machine: Machine) -> WorkloadResult:
    """Runs one workload on all systems."""
    simulated = SimulatedWorkload(workload, machine)
    stream, is_counted = simulated.stream, simulated.is_counted
    is_write = stream.is_write & is_counted
    broadcasts = simulated.remote_outcome(HARDWARE).is_broadcast & is_counted
    return WorkloadResult(
        speedups={system: simulated.speedup(system) for system in SYSTEMS},
        remote_shares={
            system: simulated.remote_share(system) for system in (NUMA, SOFTWARE, HARDWARE, NO_COHERENCE)
        },
        link_speedups={
            (system, rate): simulated.speedup(system, replace(machine, link_bytes_per_s=rate * 1e9))
            for system in LINK_SYSTEMS
            for rate in LINKS_GBYTES_PER_S
        },
        slowdowns={gib: _slowdown(simulated, machine, gib) for gib in SIZES_GIB},
        pages=sharing_of(stream, is_counted, machine.page_lines),
        lines=sharing_of(stream, is_counted, 1),
        link_bytes={
            system: float(simulated.traffic(system).sent[workload.warm_kernels :].sum())
            for system in (NUMA, NO_COHERENCE, HARDWARE)
        },
        sent_writes={
            system: int((simulated.remote_outcome(system).is_sent & is_counted).sum())
            for system in (SOFTWARE, WRITES_BACK)
        },
        broadcast_share=float(broadcasts.sum() / is_write.sum()),
    )


def _slowdown(simulated: SimulatedWorkload, machine: Machine, gib: float) -> float:
    """With as many pages in the host's memory as the cache takes from the GPU's."""
    seconds = simulated.seconds(sized(gib)).sum()
    share = gib * GIB / machine.memory_bytes
    waits = waiting_seconds(simulated.stream, machine, share)[simulated.workload.warm_kernels :].sum()
    return float(seconds / (seconds + waits))

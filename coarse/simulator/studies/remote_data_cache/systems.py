"""The document's systems: which pages are where, which caches there are, and how fast a workload runs on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from coarse.simulator.studies.remote_data_cache.accesses import placement
from coarse.simulator.studies.remote_data_cache.accesses.placement import Placement
from coarse.simulator.studies.remote_data_cache.accesses.streams import Stream
from coarse.simulator.studies.remote_data_cache.accesses.workloads import Workload
from coarse.simulator.studies.remote_data_cache.caches.last_level_cache import CacheOutcome, last_level_hits
from coarse.simulator.studies.remote_data_cache.caches.remote_cache import (
    Coherence,
    RemoteOutcome,
    with_cache,
    without_cache,
)
from coarse.simulator.studies.remote_data_cache.kernel_times import Traffic, kernel_seconds, traffic_of
from coarse.simulator.studies.remote_data_cache.parameters import GIB, Machine, scaled_lines

NUMA, MIGRATION, REPLICATION, IDEAL = "NUMA-GPU", "page migration", "read-only replication", "ideal"
NO_COHERENCE, SOFTWARE, HARDWARE = "CARVE without coherence", "CARVE-SWC", "CARVE-HWC"
WRITES_BACK = "CARVE-SWC, write-back"

SIZES_GIB: Sequence[float] = (0.5, 1.0, 2.0, 4.0)
"""Remote data caches of Table V."""


def sized(gib: float) -> str:
    """The system with hardware coherence and a cache of another size."""
    return f"CARVE-{gib:g}GB"


_PLACED = {NUMA: placement.first_touch, MIGRATION: placement.migrated, REPLICATION: placement.replicated}
_CACHED: Mapping[str, tuple[Coherence, float, bool]] = {
    NO_COHERENCE: (Coherence.NONE, 2.0, False),
    SOFTWARE: (Coherence.SOFTWARE, 2.0, False),
    WRITES_BACK: (Coherence.SOFTWARE, 2.0, True),
    HARDWARE: (Coherence.HARDWARE, 2.0, False),
    **{sized(gib): (Coherence.HARDWARE, gib, False) for gib in SIZES_GIB},
}
"""Coherence, size in GiB and whether it writes back, of systems with a remote data cache."""

SYSTEMS = (*_PLACED, IDEAL, *_CACHED)
ONE_GPU = "one GPU"


class SimulatedWorkload:
    """A workload on one GPU and on every system. What systems have in common is simulated once.

    Args:
        workload: What runs.
        machine: Sizes of caches and pages; rates may differ later.
    """

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self.workload = workload
        self._machine = machine
        kernels = workload.kernels()
        self.stream = Stream.of(kernels, machine.num_gpus)
        self._caches: list[tuple[NDArray[np.bool_], CacheOutcome]] = []
        one = Stream.of(kernels, 1)
        self._traffic = {ONE_GPU: self._traffic_without_cache(one, placement.all_local(one))}
        self._remote: dict[str, RemoteOutcome] = {}
        self._seconds: dict[tuple[str, Machine], NDArray[np.float64]] = {}

    @cached_property
    def first_touch(self) -> Placement:
        """Homes of pages in all systems but those that copy pages."""
        return placement.first_touch(self.stream, self._machine.page_lines)

    @cached_property
    def is_counted(self) -> NDArray[np.bool_]:
        """Accesses of kernels after the first ones."""
        return self.stream.kernel >= self.workload.warm_kernels

    def remote_outcome(self, system: str) -> RemoteOutcome:
        """What remote data caches let through."""
        if system not in self._remote:
            self._remote[system] = self._run_remote_cache(system)
        return self._remote[system]

    def _run_remote_cache(self, system: str) -> RemoteOutcome:
        is_remote = self.first_touch.is_remote
        if system not in _CACHED:
            return without_cache(self.stream, is_remote)
        coherence, gib, writes_back = _CACHED[system]
        return with_cache(
            self.stream,
            is_remote,
            self._cache(self.first_touch).is_hit,
            num_lines=scaled_lines(gib * GIB),
            coherence=coherence,
            private_probability=self._machine.private_probability,
            writes_back=writes_back,
        )

    def remote_share(self, system: str) -> float:
        """Part of the accesses to memory, which miss the last-level cache, that another GPU serves."""
        outcome, cache = self.remote_outcome(system), self._cache(self.first_touch)
        to_memory = self.is_counted & (~cache.is_hit | self.stream.is_write)
        is_served = self.first_touch.is_remote & ~outcome.is_hit
        return float((to_memory & is_served).sum() / to_memory.sum())

    def speedup(self, system: str, machine: Machine | None = None) -> float:
        """Over one GPU.

        Args:
            system: One of SYSTEMS.
            machine: Other rates than at the start.
        """
        return float(self.seconds(ONE_GPU, machine).sum() / self.seconds(system, machine).sum())

    def seconds(self, system: str, machine: Machine | None = None) -> NDArray[np.float64]:
        """Times of the counted kernels.

        Args:
            system: One of SYSTEMS, or ONE_GPU.
            machine: Other rates than at the start.
        """
        machine = machine or self._machine
        if (system, machine) not in self._seconds:
            serial = machine.serial_share * self._parallel_seconds(ONE_GPU, machine)
            self._seconds[system, machine] = serial + self._parallel_seconds(system, machine)
        return self._seconds[system, machine]

    def traffic(self, system: str) -> Traffic:
        """The needs of each kernel on a system."""
        if system not in self._traffic:
            self._traffic[system] = self._simulated(system)
        return self._traffic[system]

    def _parallel_seconds(self, system: str, machine: Machine) -> NDArray[np.float64]:
        return kernel_seconds(
            self.traffic(system),
            machine,
            instructions=self.workload.instructions,
            outstanding_lines=self.workload.outstanding_lines or machine.outstanding_lines,
        )[self.workload.warm_kernels :]

    def _simulated(self, system: str) -> Traffic:
        if system == IDEAL:
            return self._traffic_without_cache(self.stream, placement.all_local(self.stream))
        if system in (MIGRATION, REPLICATION):
            placed = _PLACED[system](self.stream, self._machine.page_lines)
            return self._traffic_without_cache(self.stream, placed)
        cache = self._cache(self.first_touch)
        return traffic_of(self.stream, self.first_touch, cache, self.remote_outcome(system), self._machine)

    def _traffic_without_cache(self, stream: Stream, placed: Placement) -> Traffic:
        cache = self._cache(placed) if stream.num_gpus > 1 else self._run_cache(stream, placed)
        return traffic_of(stream, placed, cache, without_cache(stream, placed.is_remote), self._machine)

    def _cache(self, placed: Placement) -> CacheOutcome:
        """Last-level caches; systems whose accesses are local and remote alike have the same."""
        for is_remote, outcome in self._caches:
            if np.array_equal(is_remote, placed.is_remote):
                return outcome
        self._caches.append((placed.is_remote, outcome := self._run_cache(self.stream, placed)))
        return outcome

    def _run_cache(self, stream: Stream, placed: Placement) -> CacheOutcome:
        machine = self._machine
        return last_level_hits(stream, placed.is_remote, sets=machine.cache_sets, ways=machine.cache_ways)


def geometric_mean(values: Sequence[float]) -> float:
    """Of values above 0."""
    return float(np.exp(np.log(values).mean()))

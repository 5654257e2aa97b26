"""DENSE on a generated machine: the model of coarse.machine.cci without a table of all pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coarse.machine.cci import LoadStore, coherence_factor
from coarse.simulator.machines.generated import GeneratedMachine
from coarse.simulator.machines.network import Network, Route


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMachine:
    """Workers load from and store to one memory device (COARSE paper, III-B).

    As dense_links() does, it gives each worker a bucket for its stores and one for its loads, and takes the share of
    coherence messages from all others.

    Args:
        base: A generated machine with one memory device.
        access: Speed of loads and stores.
    """

    base: GeneratedMachine
    access: LoadStore

    @property
    def machine(self) -> str:
        return self.base.machine

    @property
    def num_workers(self) -> int:
        return self.base.num_workers

    @property
    def num_devices(self) -> int:
        return self.base.num_devices

    @property
    def workers(self) -> Sequence[int]:
        return self.base.workers

    @property
    def devices(self) -> Sequence[int]:
        return self.base.devices

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        return self.base.groups

    @property
    def capacities(self) -> Mapping[str, float]:
        links = self.base.capacities
        factor = coherence_factor(self.num_workers)
        shared = {name: capacity / factor for name, capacity in links.items()}
        ways = (
            ("stores", self.num_workers, self.access.write_ratio),
            ("loads", self.num_workers, self.access.read_ratio),
        )
        for worker in self.workers:
            for what, device, ratio in ways:
                ends = (worker, device) if what == "stores" else (device, worker)
                path = self.base.route(*ends).buckets
                shared[self._own(worker, what)] = min(links[name] for name in path) / ratio
        return shared

    @property
    def orbit_sizes(self) -> Mapping[str, int]:
        size = self.num_workers // len(self.workers)
        own = [self._own(worker, what) for worker in self.workers for what in ("stores", "loads")]
        return {**self.base.orbit_sizes, **dict.fromkeys(own, size)}

    def route(self, source: int, target: int) -> Route:
        route = self.base.route(source, target)
        is_store = source < self.num_workers
        own = self._own(source if is_store else target, "stores" if is_store else "loads")
        return Route(buckets=(*route.buckets, own), latency_s=route.latency_s)

    def local_device(self, worker: int) -> int:
        return self.base.local_device(worker)

    def unfolded(self) -> Network:
        return replace(self, base=replace(self.base, is_folded=False))

    def _own(self, worker: int, what: str) -> str:
        return f"each worker's CCI {what}" if self.base.is_folded else f"worker {worker} CCI {what}"

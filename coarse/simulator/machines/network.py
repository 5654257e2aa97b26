"""Networks for the simulator: endpoints, and the buckets between them, where equal endpoints may be folded into one.

Endpoints are numbered as in a LinkTable: workers first, then memory devices. In a folded network one bucket stands
for an *orbit* of buckets with equal traffic, and one worker or memory device for all that are equal to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from coarse.machine.links import LinkTable
from coarse.simulator.events.fair_sharing import Usage

_BYTES_PER_S = 1e9  # for one GB/s
_S_PER_US = 1e-6


class Route(NamedTuple):
    """A path from one endpoint to another: the orbits of its buckets, and its latency in seconds."""

    buckets: tuple[str, ...]
    latency_s: float


class Network(Protocol):
    """Endpoints and the buckets between them."""

    @property
    def machine(self) -> str:
        """Name of the machine."""

    @property
    def num_workers(self) -> int:
        """All workers, folded or not."""

    @property
    def num_devices(self) -> int:
        """All memory devices, folded or not."""

    @property
    def workers(self) -> Sequence[int]:
        """The workers to simulate, each for an equal number of workers."""

    @property
    def devices(self) -> Sequence[int]:
        """The endpoints of the memory devices to simulate, each for an equal number of memory devices."""

    @property
    def capacities(self) -> Mapping[str, float]:
        """Bytes per second of one bucket of each orbit."""

    @property
    def orbit_sizes(self) -> Mapping[str, int]:
        """Number of buckets of each orbit."""

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """All workers, in groups that are near each other."""

    def route(self, source: int, target: int) -> Route:
        """The path between two endpoints, of all that exist."""

    def local_device(self, worker: int) -> int:
        """The endpoint of a worker's own memory device."""

    def unfolded(self) -> Network:
        """The same network with every endpoint and bucket on its own."""


class Transfer(NamedTuple):
    """Bytes from one endpoint to another, `copies` times among endpoints that are equal to these."""

    source: int
    target: int
    nbytes: float
    copies: float = 1.0


def usage_of(network: Network, transfers: Iterable[Transfer]) -> Usage:
    """The bytes that cross a bucket of each orbit during `transfers`; sorted by name."""
    crossed: dict[str, float] = {}
    for source, target, nbytes, copies in transfers:
        for bucket in network.route(source, target).buckets:
            crossed[bucket] = crossed.get(bucket, 0.0) + copies * nbytes
    sizes = network.orbit_sizes
    return tuple((name, crossed[name] / sizes[name]) for name in sorted(crossed))


def largest_latency_s(network: Network, pairs: Iterable[tuple[int, int]]) -> float:
    """The largest latency of the paths between `pairs`; 0 without pairs."""
    return max((network.route(*pair).latency_s for pair in pairs), default=0.0)


def worker_copies(network: Network) -> float:
    """How many workers each simulated one stands for."""
    return network.num_workers / len(network.workers)


def device_copies(network: Network) -> float:
    """How many memory devices each simulated one stands for."""
    return network.num_devices / len(network.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkNetwork:
    """The network of a link table, with every endpoint and bucket on its own.

    Args:
        links: The link table.
        local_devices: Number of each worker's own memory device, by worker.
    """

    links: LinkTable
    local_devices: tuple[int, ...]

    @property
    def machine(self) -> str:
        return self.links.machine

    @property
    def num_workers(self) -> int:
        return self.links.num_workers

    @property
    def num_devices(self) -> int:
        return self.links.num_devices

    @property
    def workers(self) -> Sequence[int]:
        return range(self.num_workers)

    @property
    def devices(self) -> Sequence[int]:
        return range(self.num_workers, self.links.num_endpoints)

    @property
    def capacities(self) -> Mapping[str, float]:
        return {bucket.name: bucket.gbytes_per_s * _BYTES_PER_S for bucket in self.links.buckets}

    @property
    def orbit_sizes(self) -> Mapping[str, int]:
        return dict.fromkeys((bucket.name for bucket in self.links.buckets), 1)

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """Workers whose path has the least latency of all belong together."""
        latencies = {
            (one, other): self.route(one, other).latency_s
            for one in self.workers
            for other in self.workers
            if one != other
        }
        least_s = min(latencies.values(), default=0.0)
        groups: list[list[int]] = []
        for worker in self.workers:
            near = [group for group in groups if latencies[group[0], worker] == least_s]
            (near[0] if near else _appended(groups)).append(worker)
        return groups

    def route(self, source: int, target: int) -> Route:
        path = self.links.path(source, target)
        names = tuple(self.links.buckets[number].name for number in path.buckets)
        return Route(buckets=names, latency_s=path.latency_us * _S_PER_US)

    def local_device(self, worker: int) -> int:
        return self.links.device(self.local_devices[worker])

    def unfolded(self) -> Network:
        return self


def _appended(groups: list[list[int]]) -> list[int]:
    groups.append([])
    return groups[-1]

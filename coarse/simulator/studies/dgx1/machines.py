"""GPUs of one host: direct links between some of them, and host lanes that pairs share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, permutations

from coarse.machine.catalogue import load_machine
from coarse.simulator.events.fair_sharing import Usage

_BYTES_PER_S = 1e9  # for one GB/s

NS_PER_S = 1e9
"""Of the buckets whose bytes are nanoseconds of a GPU's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMachine:
    """GPUs of one host.

    Args:
        name: For messages.
        links: GB/s of one direction of each direct link, by pair (lower GPU first).
        host_gbytes_per_s: One direction of the lane between a GPU and the host.
        switches: GPUs that share one lane to the host.
        host_copy_s: Fixed time of a copy between the host and a GPU.
        copy_s: Fixed time of a copy between GPUs, as a profiler sees it.
        dispatch_s: Time between two copies of one GPU.
        hop_s: Latency of one hop of a collective.
        is_relaying: Whether weights for GPUs without a link take two links; else they go through the host.
        memory_gbytes_per_s: Of a GPU's own memory.
    """

    name: str
    links: Mapping[tuple[int, int], float]
    host_gbytes_per_s: float
    switches: Sequence[Sequence[int]]
    host_copy_s: float = 0.0
    copy_s: float = 0.0
    dispatch_s: float = 0.0
    hop_s: float = 0.0
    is_relaying: bool = False
    memory_gbytes_per_s: float = math.inf

    @property
    def capacities(self) -> dict[str, float]:
        """Bytes per second of each bucket; of a GPU's kernels, nanoseconds."""
        links = {
            bucket: rate * _BYTES_PER_S
            for (one, other), rate in self.links.items()
            for bucket in (_link(one, other), _link(other, one))
        }
        lanes = {
            f"switch {switch} {way}": self.host_gbytes_per_s * _BYTES_PER_S
            for switch in range(len(self.switches))
            for way in ("up", "down")
        }
        kernels = {f"kernels {gpu}": NS_PER_S for gpus in self.switches for gpu in gpus}
        return links | lanes | kernels

    def gbytes_per_s(self, source: int, target: int) -> float:
        """Rate of the direct link; 0 without one."""
        return self.links.get((min(source, target), max(source, target)), 0.0)

    def direct(self, source: int, target: int) -> Usage:
        """The direct link from one GPU to another."""
        return ((_link(source, target), 1.0),)

    def computing(self, gpu: int) -> Usage:
        """A GPU's time, which kernels of several streams share."""
        return ((f"kernels {gpu}", 1.0),)

    def sum_s(self, nbytes: float) -> float:
        """Time to add an array to another one: two are read, one is written."""
        return 3 * nbytes / (self.memory_gbytes_per_s * _BYTES_PER_S)

    def move_s(self, nbytes: float) -> float:
        """Time to copy an array within a GPU: one is read, one is written."""
        return 2 * nbytes / (self.memory_gbytes_per_s * _BYTES_PER_S)

    def from_host(self, gpu: int) -> Usage:
        """The lane from the host to a GPU."""
        return ((f"switch {self._switch_of(gpu)} down", 1.0),)

    def to_host(self, gpu: int) -> Usage:
        """The lane from a GPU to the host."""
        return ((f"switch {self._switch_of(gpu)} up", 1.0),)

    def staging_s(self, nbytes: float) -> float:
        """Time to copy an array to the host, before it goes on from there."""
        return nbytes / (self.host_gbytes_per_s * _BYTES_PER_S)

    def _switch_of(self, gpu: int) -> int:
        return next(number for number, gpus in enumerate(self.switches) if gpu in gpus)

    def relay(self, source: int, target: int) -> int | None:
        """The GPU with the widest way of two links, the lowest of equals; None if the machine has or takes none."""
        gpus = [gpu for gpus in self.switches for gpu in gpus if gpu not in (source, target)]
        ways = {
            via: min(self.gbytes_per_s(source, via), self.gbytes_per_s(via, target)) for via in sorted(gpus)
        }
        if not self.is_relaying or not any(ways.values()):
            return None
        return max(ways, key=lambda via: ways[via])

    def ring(self, num_gpus: int) -> tuple[int, ...]:
        """Of the rings over direct links, the first one whose narrowest link is the widest.

        Raises:
            ValueError: If there is none.
        """
        ring, rate = _widest_ring(tuple(self.links.items()), num_gpus)
        if not rate:
            raise ValueError(f"{self.name}: no ring of {num_gpus} GPUs has direct links only")
        return ring


@cache
def _widest_ring(
    links: tuple[tuple[tuple[int, int], float], ...], num_gpus: int
) -> tuple[tuple[int, ...], float]:
    rates = {ends: rate for (one, other), rate in links for ends in ((one, other), (other, one))}

    def narrowest(ring: tuple[int, ...]) -> float:
        return min(rates.get(hop, 0.0) for hop in pairwise((*ring, 0)))

    best = max(((0, *rest) for rest in permutations(range(1, num_gpus))), key=narrowest)
    return best, narrowest(best)


def _link(source: int, target: int) -> str:
    return f"gpu {source} > {target}"


def pair(name: str, *, gbytes_per_s: float, host_gbytes_per_s: float, is_shared: bool) -> GpuMachine:
    """Two GPUs; `is_shared` if one lane leads to both."""
    return GpuMachine(
        name=name,
        links={(0, 1): gbytes_per_s},
        host_gbytes_per_s=host_gbytes_per_s,
        switches=[[0, 1]] if is_shared else [[0], [1]],
    )


_CUBE_MESH = [
    *(
        (one, other)
        for first in (0, 4)
        for one in range(first, first + 4)
        for other in range(one + 1, first + 4)
    ),
    *((gpu, gpu + 4) for gpu in range(4)),
]
_SWITCHES = ((0, 1), (2, 3), (4, 5), (6, 7))


def dgx1_pascal(*, gbytes_per_s: float, host_gbytes_per_s: float) -> GpuMachine:
    """DGX-1 with P100: a hybrid cube mesh of single links (recalled; the document draws only Volta's)."""
    return GpuMachine(
        name="DGX-1 with P100",
        links=dict.fromkeys(_CUBE_MESH, gbytes_per_s),
        host_gbytes_per_s=host_gbytes_per_s,
        switches=_SWITCHES,
    )


_V100_MEMORY_GBYTES_PER_S = 900.0  # recalled


def dgx1_volta(pascal: GpuMachine) -> GpuMachine:
    """DGX-1 with V100: links of the machine file `dgx1-volta`; the host's side as with P100."""
    links = load_machine("dgx1-volta").direct_links
    return replace(
        pascal,
        name="DGX-1 with V100",
        links={
            (min(link.between), max(link.between)): link.path.gbytes_per_s.value
            for link in links
            if link.path.gbytes_per_s is not None
        },
        hop_s=links[0].path.latency_us.value * 1e-6,
        is_relaying=True,
        memory_gbytes_per_s=_V100_MEMORY_GBYTES_PER_S,
    )

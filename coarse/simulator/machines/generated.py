"""Generated machines: many equal workers and memory devices under switches, which a spine joins.

spine                       without a limit of its own
├── switch 0  uplink        each direction: lanes of its workers / over-subscription
│   ├── worker 0 .. k-1     a lane each, up and down
│   └── memory devices      k / ratio, a lane each; in a pool they hang on the spine instead
└── switch 1 ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from coarse.machine.description import Figure
from coarse.simulator.machines.network import Network, Route

_BYTES_PER_S = 1e9  # for one GB/s
_S_PER_US = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a kind of generated machine.

    Args:
        what: The kind in words.
        worker_gbytes_per_s, device_gbytes_per_s: Lane of a worker and of a memory device, each direction.
        latency_us: Latency between endpoints of one switch.
        spine_latency_us: Latency between endpoints of different switches.
        is_pool: Whether memory devices hang on the spine, not on the switches of their workers.
    """

    what: str
    worker_gbytes_per_s: Figure
    device_gbytes_per_s: Figure
    latency_us: Figure
    spine_latency_us: Figure
    is_pool: bool = False


_CXL3 = Figure(value=72, source="makers of CXL 3 expanders on 8 lanes, each direction", kind="announced")
_SWITCH_US = Figure(value=0.55, source="CXL 2.0 memory behind a switch", kind="recalled")
_TWO_SWITCHES_US = Figure(value=1.1, source="twice that of one switch", kind="assumed")
_PORT = Figure(value=50, source="one port of 400 Gbit/s Ethernet or InfiniBand NDR", kind="announced")
_LEAF_US = Figure(value=2, source="RDMA within a leaf switch", kind="recalled")
_SPINE_US = Figure(value=4, source="two hops more than a leaf", kind="assumed")

KINDS: Mapping[str, Links] = MappingProxyType(
    {
        "cxl-switch": Links(
            what="workers and CXL memory devices under the same CXL switches",
            worker_gbytes_per_s=_CXL3,
            device_gbytes_per_s=_CXL3,
            latency_us=_SWITCH_US,
            spine_latency_us=_TWO_SWITCHES_US,
        ),
        "cxl-pool": Links(
            what="workers under CXL switches, memory devices in one pool behind them",
            worker_gbytes_per_s=_CXL3,
            device_gbytes_per_s=_CXL3,
            latency_us=_SWITCH_US,
            spine_latency_us=_TWO_SWITCHES_US,
            is_pool=True,
        ),
        "fat-tree": Links(
            what="a fat tree of network switches, memory devices under the leaves of their workers",
            worker_gbytes_per_s=_PORT,
            device_gbytes_per_s=_PORT,
            latency_us=_LEAF_US,
            spine_latency_us=_SPINE_US,
        ),
    }
)
"""Links of generated machines by the name of their kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedMachine:
    """A network of equal workers and memory devices. All numbers of one kind are free; none was measured.

    Args:
        kind: A name in KINDS.
        num_workers: Number of workers; a multiple of `workers_per_switch` if it is larger.
        workers_per_device: Workers of each memory device; divides `workers_per_switch`.
        workers_per_switch: Workers under a switch.
        oversubscription: Bandwidth of a switch's workers over that of its uplink, at least 1.
        has_one_device: Whether one memory device on the spine serves all workers (DENSE).
        is_folded: Whether one worker, memory device and bucket stand for all equal ones.

    Raises:
        ValueError: If the numbers do not fit together.
    """

    kind: str
    num_workers: int
    workers_per_device: int = 1
    workers_per_switch: int = 8
    oversubscription: float = 1.0
    has_one_device: bool = False
    is_folded: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no generated machine is named {self.kind!r}; known: {', '.join(KINDS)}")
        if min(self.num_workers, self.workers_per_device, self.workers_per_switch) < 1:
            raise ValueError("workers, workers of a memory device and of a switch start at 1")
        if not 1 <= self.oversubscription < float("inf"):
            raise ValueError(f"an over-subscription of {self.oversubscription:g} is below 1 or not finite")
        if self.num_workers % self._switch_size:
            raise ValueError(
                f"{self.num_workers} workers do not fill switches of {self.workers_per_switch}: choose a multiple"
            )
        if self._switch_size % self.workers_per_device:
            raise ValueError(
                f"memory devices of {self.workers_per_device} workers do not fit switches of {self._switch_size}"
            )

    @property
    def machine(self) -> str:
        """Name for results."""
        return f"{self.kind} of {self.num_workers} workers, {self.num_devices} memory devices"

    @property
    def num_devices(self) -> int:
        return 1 if self.has_one_device else self.num_workers // self.workers_per_device

    @property
    def workers(self) -> Sequence[int]:
        return range(1 if self.is_folded else self.num_workers)

    @property
    def devices(self) -> Sequence[int]:
        return [self.num_workers + device for device in range(1 if self.is_folded else self.num_devices)]

    @property
    def capacities(self) -> Mapping[str, float]:
        return {name: capacity for name, (capacity, _) in self._buckets().items()}

    @property
    def orbit_sizes(self) -> Mapping[str, int]:
        return {name: size for name, (_, size) in self._buckets().items()}

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        size = self._switch_size
        return [range(first, first + size) for first in range(0, self.num_workers, size)]

    def route(self, source: int, target: int) -> Route:
        one, other = self._switch_of(source), self._switch_of(target)
        links, buckets = KINDS[self.kind], [f"{self._name(source)} up"]
        is_far = one != other or one is None
        if is_far:
            buckets += [f"{self._switch_name(one)} up"] if one is not None else []
            buckets += [f"{self._switch_name(other)} down"] if other is not None else []
        buckets.append(f"{self._name(target)} down")
        latency = links.spine_latency_us if is_far else links.latency_us
        return Route(buckets=tuple(buckets), latency_s=latency.value * _S_PER_US)

    def local_device(self, worker: int) -> int:
        return self.num_workers + (0 if self.has_one_device else worker // self.workers_per_device)

    def unfolded(self) -> Network:
        return replace(self, is_folded=False)

    @property
    def _switch_size(self) -> int:
        return min(self.workers_per_switch, self.num_workers)

    def _buckets(self) -> dict[str, tuple[float, int]]:
        """Capacity and number of the buckets of each orbit."""
        links, num_switches = KINDS[self.kind], self.num_workers // self._switch_size
        lane = links.worker_gbytes_per_s.value * _BYTES_PER_S
        parts = (
            ("worker", self.num_workers, lane),
            ("md", self.num_devices, links.device_gbytes_per_s.value * _BYTES_PER_S),
            ("switch", num_switches, lane * self._switch_size / self.oversubscription),
        )
        buckets: dict[str, tuple[float, int]] = {}
        for part, number, capacity in parts:
            size = number if self.is_folded else 1
            for member in range(number // size):
                for way in ("up", "down"):
                    buckets[f"{self._label(part, member)} {way}"] = (capacity, size)
        return buckets

    def _label(self, part: str, number: int) -> str:
        if self.is_folded:
            return f"each {part}"
        return f"{part}{number}" if part == "md" else f"{part} {number}"

    def _name(self, endpoint: int) -> str:
        if endpoint < self.num_workers:
            return self._label("worker", endpoint)
        return self._label("md", endpoint - self.num_workers)

    def _switch_name(self, switch: int) -> str:
        return self._label("switch", switch)

    def _switch_of(self, endpoint: int) -> int | None:
        """The switch of an endpoint; None on the spine."""
        if endpoint < self.num_workers:
            return endpoint // self._switch_size
        if self.has_one_device or KINDS[self.kind].is_pool:
            return None
        return (endpoint - self.num_workers) * self.workers_per_device // self._switch_size

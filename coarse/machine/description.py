"""A machine: the wiring of its devices, the performance of its links, and the sources of these figures.

These values check themselves; machine_file.py reads them from files, and wiring.py turns them into link tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from coarse.machine.fields import FieldError, check_distinct

KINDS = ("measured", "announced", "recalled", "assumed")
"""Kind of a figure: measured by its source, announced by a maker or a standard, recalled, or assumed by us."""

GPUS, EXPANDERS = "gpus", "expanders"
"""Kinds of topology: workers and memory devices are GPUs; or memory devices are expanders of a host with workers."""

SCOPES: Mapping[str, tuple[str, ...]] = {
    GPUS: ("endpoint", "switch", "socket", "between sockets"),
    EXPANDERS: ("endpoint", "switch", "host"),
}
"""Possible scopes of a link, by kind of topology."""

PATHS: Mapping[str, tuple[str, ...]] = {
    GPUS: ("local", "remote", "far", "cci"),
    EXPANDERS: ("worker-device", "device-device", "worker-worker"),
}
"""Names of paths, by kind of topology; those in OPTIONAL_PATHS may be omitted."""

OPTIONAL_PATHS = ("far", "cci")
"""Across sockets, and between memory devices (the paper's CCI, Fig 5 to 7); if omitted, like any other pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number and its source.

    Args:
        value: The number, in the unit of the field's name.
        source: The publication of the number, or the basis of the assumption.
        kind: One of KINDS.

    Raises:
        FieldError: If the number is negative or not finite, the source is empty, or the kind is unknown.
    """

    value: float
    source: str
    kind: str

    def __post_init__(self) -> None:
        if (
            isinstance(self.value, bool)
            or not isinstance(self.value, int | float)
            or not math.isfinite(self.value)
        ):
            raise FieldError("value", f"value {self.value!r} is not a finite number")
        if self.value < 0:
            raise FieldError("value", f"value {self.value:g} is negative")
        if not isinstance(self.source, str) or not self.source.strip():
            raise FieldError("source", "source is empty: say where the number comes from")
        if self.kind not in KINDS:
            raise FieldError("kind", f"kind {self.kind!r} must be one of {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link of paths; one exists for each instance of its scope.

    Args:
        name: Its name in `over` of a path.
        scope: One of SCOPES.
        gbytes_per_s: Bandwidth of each direction.
        duplex_gbytes_per_s: Bandwidth of both directions together; None if they do not limit each other.
        read_gbytes_per_s: Bandwidth of reads, which leave a memory device, if it differs from that of writes; only
            for scope "endpoint".

    Raises:
        FieldError: If a capacity is zero; if both directions together are slower than one alone or faster than the
            sum; if reads have their own capacity other than at an endpoint.
    """

    name: str
    scope: str
    gbytes_per_s: Figure
    duplex_gbytes_per_s: Figure | None = None
    read_gbytes_per_s: Figure | None = None

    def __post_init__(self) -> None:
        if self.read_gbytes_per_s is not None and self.scope != "endpoint":
            raise FieldError(
                "read_gbytes_per_s",
                ("only a link of scope 'endpoint' can have separate values for reads and writes"),
            )
        _check_bandwidths(self.gbytes_per_s, self.duplex_gbytes_per_s, self.read_gbytes_per_s)

    @property
    def directions(self) -> tuple[Figure, ...]:
        """The bandwidths of its directions: one for both, or one of writes and one of reads."""
        return (self.gbytes_per_s, *(() if self.read_gbytes_per_s is None else (self.read_gbytes_per_s,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PathClass:
    """Common properties of all paths of one kind.

    Args:
        latency_us: Time of a transfer of no bytes.
        gbytes_per_s: Bandwidth of a single transfer between two endpoints; None if only links limit it.
        duplex_gbytes_per_s: Total bandwidth of a transfer each way between two endpoints; None for no separate limit.
        over: Names of its links.

    Raises:
        FieldError: As for a Link; if the path has no limit at all; if a link is named twice.
    """

    latency_us: Figure
    gbytes_per_s: Figure | None = None
    duplex_gbytes_per_s: Figure | None = None
    over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.gbytes_per_s is None and not self.over:
            raise FieldError("over", "a path needs gbytes_per_s, or the links that it uses")
        if self.gbytes_per_s is None and self.duplex_gbytes_per_s is not None:
            raise FieldError("duplex_gbytes_per_s", "duplex_gbytes_per_s needs gbytes_per_s too")
        _check_bandwidths(self.gbytes_per_s, self.duplex_gbytes_per_s)
        check_distinct("over", self.over, "link")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectLink:
    """A link that only two GPUs use, such as NVLink; it replaces their path.

    Args:
        between: The two GPUs.
        path: Its latency and bandwidths, over no other links.

    Raises:
        FieldError: If `between` is not two GPUs, or the path leads over links.
    """

    between: tuple[int, ...]
    path: PathClass

    def __post_init__(self) -> None:
        if len(self.between) != 2 or self.between[0] == self.between[1]:
            raise FieldError("between", f"between {list(self.between)} does not name two GPUs")
        if self.path.over:
            raise FieldError("over", "a direct link cannot use other links")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network between nodes that are all such machines; each node has one interface.

    Args:
        latency_us: Time of a transfer of no bytes from an endpoint of one node to an endpoint of another.
        gbytes_per_s: Bandwidth of each direction of an interface.
        over: Names of the links between an endpoint and its node's interface.

    Raises:
        FieldError: If the bandwidth is zero, or a link is named twice.
    """

    latency_us: Figure
    gbytes_per_s: Figure
    over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_bandwidths(self.gbytes_per_s, None)
        check_distinct("over", self.over, "link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power of devices during a step.

    Args:
        worker_watt: Power of a worker.
        device_watt: Power of a memory device.
    """

    worker_watt: Figure
    device_watt: Figure

    def energy_j(self, num_workers: int, num_devices: int, seconds: float) -> float:
        """Energy of workers and memory devices."""
        watt = num_workers * self.worker_watt.value + num_devices * self.device_watt.value
        return watt * seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The places of devices.

    Args:
        kind: GPUS or EXPANDERS.
        gpu: Model of the GPUs; "" for expanders.
        switches: The GPUs under each switch; () for expanders, which exist in any number.
        sockets: The switches under each socket's host bridge; () for expanders.

    Raises:
        FieldError: If a GPU or switch is named twice, missing or unknown.
    """

    kind: str
    gpu: str = ""
    switches: tuple[tuple[int, ...], ...] = ()
    sockets: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in PATHS:
            raise FieldError("kind", f"kind {self.kind!r} must be one of {', '.join(PATHS)}")
        if self.kind == EXPANDERS:
            for name in ("gpu", "switches", "sockets"):
                if getattr(self, name):
                    raise FieldError(name, f"{name} has no meaning for expanders")
            return
        gpus = [gpu for switch in self.switches for gpu in switch]
        _check_numbering("switches", gpus, "GPU")
        switches = [switch for socket in self.sockets for switch in socket]
        _check_numbering("sockets", switches, "switch")
        if len(switches) != len(self.switches):
            raise FieldError(
                "sockets", f"sockets name {len(switches)} switches, but the machine has {len(self.switches)}"
            )

    @property
    def num_gpus(self) -> int:
        """Number of GPUs; 0 for expanders."""
        return sum(len(switch) for switch in self.switches)

    def switch_of(self, gpu: int) -> int:
        """The switch of a GPU."""
        return next(number for number, gpus in enumerate(self.switches) if gpu in gpus)

    def socket_of(self, gpu: int) -> int:
        """The socket of a GPU."""
        switch = self.switch_of(gpu)
        return next(number for number, switches in enumerate(self.sockets) if switch in switches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine that COARSE can emulate. Immutable.

    Args:
        name: Its name for `--machine`.
        description: One sentence.
        topology: The places of devices.
        links: Links by name.
        paths: Paths by name, from PATHS.
        direct_links: Links between pairs of GPUs.
        network: The network between several of it; None if it is unknown.
        power: Power of its devices; None if it is unknown.

    Raises:
        FieldError: If a path is missing or unknown, a path or the network leads over an unknown link, the network
            leads over one between sockets, a path is faster than one of its links, a link's scope does not fit the
            topology, or a direct link occurs twice or joins unknown GPUs.

    Example:
        >>> from coarse.machine.catalogue import (load_machine)
        >>> table = link_table(load_machine("aws-p3"), PartitionTable.even(num_workers=4, num_devices=4))
        >>> table.duplex_gbytes_per_s(table.worker(0), table.device(0))
        9.0
    """

    name: str
    description: str
    topology: Topology
    links: tuple[Link, ...]
    paths: Mapping[str, PathClass]
    direct_links: tuple[DirectLink, ...] = field(default=())
    network: Network | None = None
    power: Power | None = None

    def __post_init__(self) -> None:
        kind = self.topology.kind
        for link in self.links:
            if link.scope not in SCOPES[kind]:
                expected = ", ".join(SCOPES[kind])
                raise FieldError(f"link.{link.name}.scope", f"scope {link.scope!r} must be one of {expected}")
        for name in PATHS[kind]:
            if name not in self.paths and name not in OPTIONAL_PATHS:
                raise FieldError("path", f"path.{name} is missing")
        for name in self.paths:
            self._check_path(name)
        if self.network is not None:
            self._check_network(self.network.over)
        self._check_direct_links()

    def _check_path(self, name: str) -> None:
        if name not in PATHS[self.topology.kind]:
            known = ", ".join(PATHS[self.topology.kind])
            raise FieldError(f"path.{name}", f"path {name!r} must be one of {known}")
        path = self.paths[name]
        self._check_over(f"path.{name}.over", "path", path.over)
        links = {link.name: link for link in self.links}
        for link_name in path.over:
            most = max(figure.value for figure in links[link_name].directions)
            if path.gbytes_per_s is not None and path.gbytes_per_s.value > most:
                raise FieldError(
                    f"path.{name}.gbytes_per_s",
                    f"{path.gbytes_per_s.value:g} GB/s exceed the {most:g} GB/s of its link {link_name!r}",
                )

    def _check_network(self, over: tuple[str, ...]) -> None:
        self._check_over("network.over", "network", over)
        for link in self.links:
            if link.name in over and link.scope == "between sockets":
                raise FieldError(
                    "network.over",
                    f"network over link {link.name!r}, which joins sockets: the file does not say at which of "
                    "them the interface is",
                )

    def _check_over(self, where: str, what: str, over: tuple[str, ...]) -> None:
        names = {link.name for link in self.links}
        for link_name in over:
            if link_name not in names:
                known = ", ".join(sorted(names)) or "none"
                raise FieldError(where, f"{what} over unknown link {link_name!r}; known: {known}")

    def _check_direct_links(self) -> None:
        seen: set[frozenset[int]] = set()
        for number, link in enumerate(self.direct_links):
            where = f"direct_link.{number}.between"
            for gpu in link.between:
                if not 0 <= gpu < self.topology.num_gpus:
                    raise FieldError(where, f"GPU {gpu} is not one of the {self.topology.num_gpus} GPUs")
            if frozenset(link.between) in seen:
                raise FieldError(
                    where, f"a second direct link between GPUs {link.between[0]} and {link.between[1]}"
                )
            seen.add(frozenset(link.between))


def _check_bandwidths(one_way: Figure | None, duplex: Figure | None, read: Figure | None = None) -> None:
    named = (("gbytes_per_s", one_way), ("duplex_gbytes_per_s", duplex), ("read_gbytes_per_s", read))
    for name, figure in named:
        if figure is not None and figure.value == 0:
            raise FieldError(name, "a bandwidth must be above 0 GB/s")
    if one_way is None or duplex is None:
        return
    alone = (one_way.value, one_way.value if read is None else read.value)
    if not max(alone) <= duplex.value <= sum(alone):
        most = "twice that" if read is None else f"both ({sum(alone):g})"
        raise FieldError(
            "duplex_gbytes_per_s",
            f"both directions together ({duplex.value:g} GB/s) must reach at least the faster single direction "
            f"({max(alone):g}) and at most {most}",
        )


def _check_numbering(name: str, numbers: list[int], what: str) -> None:
    if not numbers:
        raise FieldError(name, f"{name} is empty")
    check_distinct(name, numbers, what)
    missing = sorted(set(range(len(numbers))) - set(numbers))
    if missing:
        raise FieldError(name, f"{what} {missing[0]} is missing: they are numbered from 0 without gaps")

"""A machine: how its devices are wired, what its links can do, and who says so.

These values check themselves; files of them are read by profile_file.py and become link tables in wiring.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from coarse.machine.fields import FieldError, check_distinct

KINDS = ("measured", "announced", "recalled", "assumed")
"""What a figure is: measured by its source, announced by a maker or a standard, recalled, or assumed by us."""

GPUS, EXPANDERS = "gpus", "expanders"
"""Kinds of topology: workers and memory devices are GPUs; or memory devices are expanders of a host with workers."""

SCOPES: Mapping[str, tuple[str, ...]] = {
    GPUS: ("endpoint", "switch", "socket", "between sockets"),
    EXPANDERS: ("endpoint", "switch", "host"),
}
"""What a link may belong to, by kind of topology."""

PATHS: Mapping[str, tuple[str, ...]] = {
    GPUS: ("local", "remote", "far", "cci"),
    EXPANDERS: ("worker-device", "device-device", "worker-worker"),
}
"""Names of paths, by kind of topology; those in OPTIONAL_PATHS may be left out."""

OPTIONAL_PATHS = ("far", "cci")
"""Across sockets, and between memory devices (the paper's CCI, Fig 5 to 7): without them, as any other pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number and where it comes from.

    Args:
        value: The number, in the unit that the name of its field gives.
        source: Where it stands, or what it is assumed from.
        kind: One of KINDS.

    Raises:
        FieldError: If the number is negative or not finite, the source empty, or the kind unknown.
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
            raise FieldError("value", f"value {self.value!r} is no finite number")
        if self.value < 0:
            raise FieldError("value", f"value {self.value:g} is negative")
        if not isinstance(self.source, str) or not self.source.strip():
            raise FieldError("source", "source is empty: say where the number comes from")
        if self.kind not in KINDS:
            raise FieldError("kind", f"kind {self.kind!r} is none of {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link that paths lead over; there is one for each thing that its scope names.

    Args:
        name: What `over` of a path calls it.
        scope: One of SCOPES.
        gbytes_per_s: Of each direction.
        duplex_gbytes_per_s: Of both directions together; None if they do not limit each other.
        read_gbytes_per_s: Of what leaves a memory device, which is read, if that is not as fast as what is written to
            it; of scope "endpoint" only.

    Raises:
        FieldError: If a capacity is zero, or both directions together get less than one alone or more than both; if
            reads have a capacity of their own elsewhere than at an endpoint.
    """

    name: str
    scope: str
    gbytes_per_s: Figure
    duplex_gbytes_per_s: Figure | None = None
    read_gbytes_per_s: Figure | None = None

    def __post_init__(self) -> None:
        if self.read_gbytes_per_s is not None and self.scope != "endpoint":
            raise FieldError("read_gbytes_per_s", "only a link of scope 'endpoint' tells reads from writes")
        _check_bandwidths(self.gbytes_per_s, self.duplex_gbytes_per_s, self.read_gbytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathClass:
    """What all paths of one kind have in common.

    Args:
        latency_us: Of a transfer of no bytes.
        gbytes_per_s: What a transfer between two endpoints gets alone; None if only links limit it.
        duplex_gbytes_per_s: What a transfer each way between two endpoints get in sum; None for no limit of its own.
        over: Names of the links that it leads over.

    Raises:
        FieldError: As of a Link; if there is no limit at all; if a link is named twice.
    """

    latency_us: Figure
    gbytes_per_s: Figure | None = None
    duplex_gbytes_per_s: Figure | None = None
    over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.gbytes_per_s is None and not self.over:
            raise FieldError("over", "a path needs gbytes_per_s, or links that it leads over")
        if self.gbytes_per_s is None and self.duplex_gbytes_per_s is not None:
            raise FieldError("duplex_gbytes_per_s", "duplex_gbytes_per_s needs gbytes_per_s beside it")
        _check_bandwidths(self.gbytes_per_s, self.duplex_gbytes_per_s)
        check_distinct("over", self.over, "link")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectLink:
    """A link between two GPUs that nothing else uses, such as NVLink; it takes the place of their path.

    Args:
        between: The two GPUs.
        path: Its latency and bandwidths, over no other links.

    Raises:
        FieldError: If these are not two GPUs, or the path leads over links.
    """

    between: tuple[int, ...]
    path: PathClass

    def __post_init__(self) -> None:
        if len(self.between) != 2 or self.between[0] == self.between[1]:
            raise FieldError("between", f"between {list(self.between)} does not name two GPUs")
        if self.path.over:
            raise FieldError("over", "a direct link leads over no other links")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where devices sit.

    Args:
        kind: GPUS or EXPANDERS.
        gpu: Model of the GPUs; "" for expanders.
        switches: The GPUs under each switch; () for expanders, of which there are as many as asked for.
        sockets: The switches under each socket's host bridge; () for expanders.

    Raises:
        FieldError: If a GPU or switch is named twice, left out or unknown.
    """

    kind: str
    gpu: str = ""
    switches: tuple[tuple[int, ...], ...] = ()
    sockets: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in PATHS:
            raise FieldError("kind", f"kind {self.kind!r} is none of {', '.join(PATHS)}")
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
                "sockets", f"sockets name {len(switches)} switches, there are {len(self.switches)}"
            )

    @property
    def num_gpus(self) -> int:
        """How many GPUs there are; 0 for expanders."""
        return sum(len(switch) for switch in self.switches)

    def switch_of(self, gpu: int) -> int:
        """The switch that a GPU sits under."""
        return next(number for number, gpus in enumerate(self.switches) if gpu in gpus)

    def socket_of(self, gpu: int) -> int:
        """The socket that a GPU sits under."""
        switch = self.switch_of(gpu)
        return next(number for number, switches in enumerate(self.sockets) if switch in switches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine that COARSE can pretend to run on. Immutable.

    Args:
        name: What `--machine` calls it.
        description: One sentence.
        topology: Where devices sit.
        links: By name.
        paths: By name, of PATHS.
        direct_links: Between pairs of GPUs.

    Raises:
        FieldError: If a path is missing or unknown, a path leads over an unknown link, a link's scope does not fit
            the topology, or a direct link is there twice or joins unknown GPUs.

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

    def __post_init__(self) -> None:
        kind = self.topology.kind
        names = {link.name for link in self.links}
        for link in self.links:
            if link.scope not in SCOPES[kind]:
                expected = ", ".join(SCOPES[kind])
                raise FieldError(f"link.{link.name}.scope", f"scope {link.scope!r} is none of {expected}")
        for name in PATHS[kind]:
            if name not in self.paths and name not in OPTIONAL_PATHS:
                raise FieldError("path", f"path.{name} is missing")
        for name, path in self.paths.items():
            if name not in PATHS[kind]:
                raise FieldError(f"path.{name}", f"path {name!r} is none of {', '.join(PATHS[kind])}")
            for link_name in path.over:
                if link_name not in names:
                    known = ", ".join(sorted(names)) or "none"
                    raise FieldError(
                        f"path.{name}.over", f"path over unknown link {link_name!r}; known: {known}"
                    )
        self._check_direct_links()

    def _check_direct_links(self) -> None:
        seen: set[frozenset[int]] = set()
        for number, link in enumerate(self.direct_links):
            where = f"direct_link.{number}.between"
            for gpu in link.between:
                if not 0 <= gpu < self.topology.num_gpus:
                    raise FieldError(where, f"GPU {gpu} is none of the {self.topology.num_gpus} GPUs")
            if frozenset(link.between) in seen:
                raise FieldError(
                    where, f"a second direct link between GPUs {link.between[0]} and {link.between[1]}"
                )
            seen.add(frozenset(link.between))


def _check_bandwidths(one_way: Figure | None, duplex: Figure | None, read: Figure | None = None) -> None:
    named = (("gbytes_per_s", one_way), ("duplex_gbytes_per_s", duplex), ("read_gbytes_per_s", read))
    for name, figure in named:
        if figure is not None and figure.value == 0:
            raise FieldError(name, "a bandwidth of 0 GB/s moves nothing")
    if one_way is None or duplex is None:
        return
    alone = (one_way.value, one_way.value if read is None else read.value)
    if not max(alone) <= duplex.value <= sum(alone):
        most = "twice that" if read is None else f"both ({sum(alone):g})"
        raise FieldError(
            "duplex_gbytes_per_s",
            f"both directions together ({duplex.value:g} GB/s) must get at least what one gets alone "
            f"({max(alone):g}) and at most {most}",
        )


def _check_numbering(name: str, numbers: list[int], what: str) -> None:
    if not numbers:
        raise FieldError(name, f"{name} is empty")
    check_distinct(name, numbers, what)
    missing = sorted(set(range(len(numbers))) - set(numbers))
    if missing:
        raise FieldError(name, f"{what} {missing[0]} is missing: they are numbered from 0 on without gaps")

"""What `nodes.py` is to measure, and what its results have already."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node_network import Link
from node_systems import ALL_REDUCE, STEP, SYSTEMS
from node_table import Record

from coarse.bench.provenance import Provenance
from coarse.bench.sync.driver import format_bytes

GRANULE_BYTES = 4 << 10
"""Gradients have a multiple of it."""

MOST_NODES = 16

Key = tuple[Any, ...]
"""What tells cases apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Nodes and their cables."""

    link: Link
    nodes: int
    workers: int

    @property
    def num_workers(self) -> int:
        return self.nodes * self.workers

    def __str__(self) -> str:
        loss = f", {self.link.loss_percent:g}% loss" if self.link.loss_percent else ""
        return f"{self.link.rate}, {self.link.delay_ms:g} ms{loss}, {self.nodes} x {self.workers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operation on gradients of a size, in a cell: all systems that do it are compared."""

    cell: Cell
    operation: str
    nbytes: int

    def as_json(self) -> dict[str, Any]:
        """The fields of a record that tell cases apart."""
        sizes = {"nodes": self.cell.nodes, "workers": self.cell.workers, "bytes": self.nbytes}
        return {**asdict(self.cell.link), **sizes, "operation": self.operation}

    @property
    def key(self) -> Key:
        """That of its record."""
        return key_of(self.as_json())

    def __str__(self) -> str:
        return f"{self.cell}, {self.operation} of {format_bytes(self.nbytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run.

    Raises:
        ValueError: If a value is out of range.
    """

    links: tuple[Link, ...]
    nodes: tuple[int, ...]
    workers: tuple[int, ...]
    sizes: tuple[int, ...]
    operations: tuple[str, ...]
    systems: tuple[str, ...]
    rounds: int
    budget_s: float

    def __post_init__(self) -> None:
        if any(not 2 <= each <= MOST_NODES for each in self.nodes):
            raise ValueError(f"2 to {MOST_NODES} nodes are possible, not {self.nodes}")
        if min(self.workers) < 1 or self.rounds < 1 or self.budget_s <= 0:
            raise ValueError("workers and rounds start at 1, the budget above 0 s")
        if any(size < GRANULE_BYTES or size % GRANULE_BYTES for size in self.sizes):
            raise ValueError(f"sizes are positive multiples of {format_bytes(GRANULE_BYTES)}")
        if not self.systems or not self.operations:
            raise ValueError("nothing to measure: no system or no operation is left")
        for kind, chosen, known in (
            ("operation", self.operations, (STEP, ALL_REDUCE)),
            ("system", self.systems, tuple(SYSTEMS)),
        ):
            if unknown := [each for each in chosen if each not in known]:
                raise ValueError(f"{kind} {unknown[0]!r} is none of {', '.join(known)}")

    def systems_of(self, operation: str) -> list[str]:
        """The systems that do an operation."""
        return [each for each in self.systems if operation in SYSTEMS[each].operations]

    def cases(self) -> list[Case]:
        """All cases, by cell."""
        cells = itertools.product(self.links, self.nodes, self.workers)
        return [
            Case(cell=Cell(link=link, nodes=num_nodes, workers=workers), operation=operation, nbytes=nbytes)
            for link, num_nodes, workers in cells
            for operation in self.operations
            for nbytes in self.sizes
            if self.systems_of(operation)
        ]


def key_of(record: Record) -> Key:
    """The key of a record's case."""
    names = ("rate", "delay_ms", "loss_percent", "nodes", "workers", "operation", "bytes")
    return tuple(record[name] for name in names)


def read_records(path: Path, origin: Provenance) -> dict[Key, Record]:
    """The last record of each case in a file, of the same commit and machine; none if the checkout is changed."""
    if not path.exists() or origin.commit.endswith("-dirty"):
        return {}
    origin_fields = {"bench": "nodes", **asdict(origin)}.items()
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {key_of(each): each for each in records if origin_fields <= each.items()}


def is_known(case: Case, plan: Plan, records: Mapping[Key, Record]) -> bool:
    """Whether there is a record with all systems of a case, in as many rounds as wanted."""
    rounds_ms = records.get(case.key, {}).get("rounds_ms", {})
    return all(len(rounds_ms.get(each, ())) >= plan.rounds for each in plan.systems_of(case.operation))

"""Results of a study: figures with a document's, claims that hold or do not, pictures and state tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    from matplotlib.figure import Figure

TOLERANCE = 0.15
"""Largest residual of a predicted figure that agrees with its document."""

_ROUNDING = 0.006  # documents print three digits

Progress = Callable[[str], None]
"""Called with a few words before each part of a study."""


class Basis(Enum):
    """How a simulated figure depends on the document's."""

    FITTED = "fitted"
    """A parameter was chosen so that this figure comes out."""
    PREDICTED = "predicted"
    """No parameter was chosen by this figure."""
    EXACT = "exact"
    """It follows by arithmetic or counting, and agrees to the digits that the document prints."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A document's figure, and ours.

    Args:
        what: The quantity and its case, e.g. "AlexNet, 4 GPUs, batch 32".
        document: The document's figure.
        simulated: Ours, in the same unit.
        source: Table, figure or section, e.g. "Table 2.6".
        basis: Fitted, predicted or exact.
        unit: e.g. "s"; "" for a ratio.
        reason: Why it does not agree; "" if it agrees or the reason is unknown.

    Raises:
        ValueError: If a figure is not finite, or the document's is 0 and not exact.
    """

    what: str
    document: float
    simulated: float
    source: str
    basis: Basis
    unit: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.document) or not math.isfinite(self.simulated):
            raise ValueError(f"{self.what}: {self.document} beside {self.simulated} cannot be compared")
        if self.document == 0 and self.basis is not Basis.EXACT:
            raise ValueError(f"{self.what}: nothing is relative to 0")

    @property
    def residual(self) -> float:
        """Relative to the document's figure."""
        if self.document == 0:
            return 0.0 if self.simulated == 0 else math.inf
        return self.simulated / self.document - 1

    @property
    def agrees(self) -> bool:
        """Whether the residual is within TOLERANCE, or within rounding if the figure is exact."""
        return abs(self.residual) <= (_ROUNDING if self.basis is Basis.EXACT else TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A document's statement without a number of its own, such as the shape of a curve.

    Args:
        what: The statement.
        source: Table, figure or section.
        holds: Whether the simulation bears it out.
        found: What came out, in words and numbers.
        reason: Why it does not hold.
    """

    what: str
    source: str
    holds: bool
    found: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTable:
    """A protocol's states step by step, for the terminal.

    Args:
        title: Its subject.
        columns: Heads, e.g. ("step", "cts of CU 0").
        rows: One for each step.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """Everything that a study found. Each figure of it is simulated.

    Args:
        comparisons: Figures with the document's.
        claims: The document's other statements.
        tables: Results without a counterpart in the document.
        pictures: Plots by file name without suffix, with the document's points on them.
    """

    comparisons: Sequence[Comparison] = ()
    claims: Sequence[Claim] = ()
    tables: Sequence[StateTable] = ()
    pictures: Mapping[str, Figure] = field(default_factory=dict)

    def deviations(self) -> Iterator[Comparison | Claim]:
        """The figures that differ and the claims that do not hold."""
        yield from (each for each in self.comparisons if not each.agrees)
        yield from (each for each in self.claims if not each.holds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A system of one document.

    Args:
        name: As on the command line; also the name of its page in docs/simulator.
        title: In a few words.
        document: Author, short title and year.
        run: Simulates everything; deterministic.
        traces: State tables by name, for `coarse simulate NAME --trace TRACE`.
    """

    name: str
    title: str
    document: str
    run: Callable[[Progress], StudyResult]
    traces: Mapping[str, Callable[[], StateTable]] = field(default_factory=dict)

"""Parameters of a simulation, each with its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from coarse.simulator.studies.study import StateTable


class Origin(Enum):
    """Where a parameter's value comes from."""

    DOCUMENT = "document"
    """Printed in the document."""
    DERIVED = "derived"
    """Follows from figures of the document by arithmetic."""
    FITTED = "fitted"
    """Chosen so that one figure of the document comes out."""
    MEASURED = "measured"
    """Measured by a benchmark of this project."""
    ASSUMED = "assumed"
    """Neither printed nor measured; a plausible value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A number that a simulation takes.

    Args:
        what: The quantity.
        value: In `unit`.
        unit: e.g. "us"; "" for a plain number.
        origin: Where it comes from.
        source: Table, figure, slide or benchmark; the reason of an assumption.

    Raises:
        ValueError: If the value is not above 0, or nothing is said about its source.
    """

    what: str
    value: float
    unit: str
    origin: Origin
    source: str

    def __post_init__(self) -> None:
        if not self.value > 0 or not self.source:
            raise ValueError(f"a parameter is above 0 and has a source: {self}")


def parameter_table(title: str, parameters: Sequence[Parameter]) -> StateTable:
    """All parameters with their origins, one a row."""
    return StateTable(
        title=title,
        columns=("parameter", "value", "unit", "origin", "source"),
        rows=[
            (each.what, f"{each.value:g}", each.unit, each.origin.value, each.source) for each in parameters
        ],
    )

"""Expectations with their sources, and verdicts on measurements: within, lower, higher, or other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from experiments.paper import is_citation

WITHIN, LOWER, HIGHER, OTHER = "within", "lower", "higher", "other"

PREDICTED = "predicted"
"""Source of an expectation that the project's own model computes."""

AIM = "own aim"
"""Source of an expectation that this project has set itself, because the paper gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A value or a range, and how far a measurement may lie outside of it. Better than expected differs, too.

    Args:
        what: The quantity; "" if the row has one alone.
        low, high: The ends of the range; equal for a value.
        tolerance: Accepted distance beyond both ends, in the unit.
        unit: Follows the number, e.g. " GB/s".
        source: Sections and figures of the paper, separated by ", ", or PREDICTED or AIM.

    Raises:
        ValueError: If the range is empty, a number is not finite, or the paper lacks the source.
    """

    what: str = ""
    low: float
    high: float
    tolerance: float = 0.0
    unit: str = ""
    source: str

    def __post_init__(self) -> None:
        _check_source(self.source)
        if not -math.inf < self.low <= self.high < math.inf or not 0 <= self.tolerance < math.inf:
            raise ValueError(
                f"{self.low:g} to {self.high:g} ± {self.tolerance:g} is no range with a tolerance"
            )

    def verdict(self, value: float) -> str:
        """WITHIN the range and its tolerance, LOWER or HIGHER. NaN is LOWER."""
        if not value >= self.low - self.tolerance:
            return LOWER
        return WITHIN if value <= self.high + self.tolerance else HIGHER

    def furthest(self, values: Iterable[float]) -> float:
        """The value that lies furthest outside of the range, or least inside."""
        return max(values, key=lambda value: max(self.low - value, value - self.high))

    def __str__(self) -> str:
        numbers = f"{self.low:.3g}" + (f" to {self.high:.3g}" if self.high > self.low else "")
        tolerance = f" ± {self.tolerance:.2g}" if self.tolerance else ""
        return f"{self.what} {numbers}{tolerance}{self.unit} ({self.source})".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured value, and the lowest and highest of its repeats or places.

    Raises:
        ValueError: If the value lies outside of its spread, or is NaN.
    """

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value:g} is not from {self.low:g} to {self.high:g}")

    @classmethod
    def exactly(cls, value: float) -> Measured:
        """A value without a spread, such as a count."""
        return cls(value=value, low=value, high=value)

    def over(self, other: Measured) -> Measured:
        """The quotient of two positive values, and the range of the quotients in their spreads."""
        return Measured(value=self.value / other.value, low=self.low / other.high, high=self.high / other.low)

    def times(self, factor: float) -> Measured:
        """All numbers times a positive factor."""
        return Measured(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def shifted(self, by: float) -> Measured:
        """All numbers plus `by`."""
        return Measured(value=self.value + by, low=self.low + by, high=self.high + by)

    def percent_more(self) -> Measured:
        """A quotient as the per cent by which it exceeds 1."""
        return self.shifted(-1).times(100)

    @classmethod
    def spanning(cls, middle: Measured, others: Sequence[Measured]) -> Measured:
        """The middle one's value, with the range of all."""
        every = (middle, *others)
        return cls(
            value=middle.value, low=min(each.low for each in every), high=max(each.high for each in every)
        )

    @classmethod
    def median_of(cls, values: Sequence[float]) -> Measured:
        """The median of repeats."""
        return cls(value=median(values), low=min(values), high=max(values))

    def __str__(self) -> str:
        # Rounded, and without a sign of 0, because differences of equal numbers are seldom 0.
        value, low, high = (f"{round(number, 9) + 0.0:.3g}" for number in (self.value, self.low, self.high))
        return value if low == high else f"{value} ({low} to {high})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberCheck:
    """A measured number beside its expectation."""

    expectation: Expectation
    measured: Measured

    @property
    def verdict(self) -> str:
        """WITHIN, LOWER or HIGHER."""
        return self.expectation.verdict(self.measured.value)

    @property
    def what(self) -> str:
        return self.expectation.what

    @property
    def expected(self) -> str:
        """The expectation in words."""
        return str(self.expectation)

    @property
    def found(self) -> str:
        """The measurement in words."""
        return f"{self.what} {self.measured}{self.expectation.unit}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryCheck:
    """The categories of all places beside the expected one.

    Args:
        what: The property; "" if the row has one alone.
        category: What every place is expected to be.
        categories: What the places are.
        source: As in Expectation.
    """

    what: str = ""
    category: str
    categories: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        _check_source(self.source)

    @property
    def verdict(self) -> str:
        """WITHIN if there are places, all of the expected category; otherwise OTHER."""
        return WITHIN if set(self.categories) == {self.category} else OTHER

    @property
    def expected(self) -> str:
        """The expectation in words."""
        return f"{self.what} {self.category} ({self.source})".strip()

    @property
    def found(self) -> str:
        """The categories in words, each once."""
        return f"{self.what} {', '.join(dict.fromkeys(self.categories)) or 'none'}".strip()


Check = NumberCheck | CategoryCheck


def judge_all(expectation: Expectation, values: Sequence[float], *, uncertainty: float = 0.0) -> NumberCheck:
    """Holds the value of every place to an expectation, by that which is furthest off.

    Args:
        expectation: Of each place.
        values: Positive; of all places.
        uncertainty: Relative uncertainty of each value, which widens their range.
    """
    low, high = min(values) * (1 - uncertainty), max(values) * (1 + uncertainty)
    furthest = expectation.furthest(values)
    return NumberCheck(expectation=expectation, measured=Measured(value=furthest, low=low, high=high))


def judge_number(expectation: Expectation, value: float) -> NumberCheck:
    """Holds a number without a spread to an expectation."""
    return NumberCheck(expectation=expectation, measured=Measured.exactly(value))


def check_as_json(check: Check) -> dict[str, Any]:
    """The fields of a check and its verdict."""
    return {**asdict(check), "verdict": check.verdict}


def check_from_json(values: Mapping[str, Any]) -> Check:
    """Reads check_as_json(); the verdict is computed anew."""
    if "category" in values:
        fields = {name: values[name] for name in ("what", "category", "source")}
        return CategoryCheck(**fields, categories=tuple(values["categories"]))
    return NumberCheck(
        expectation=Expectation(**values["expectation"]), measured=Measured(**values["measured"])
    )


def _check_source(source: str) -> None:
    if source in (PREDICTED, AIM):
        return
    for name in source.split(", "):
        if not is_citation(name):
            raise ValueError(
                f"the paper has no {name!r}; sources are such as 'III-E', 'Fig 16e', {PREDICTED!r}"
            )

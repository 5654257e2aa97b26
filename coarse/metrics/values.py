"""Metrics that were read, as values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coarse.metrics.declarations import BUCKET_BOUNDS_S, Declaration


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations.

    Args:
        counts: Number of durations in each bucket of BUCKET_BOUNDS_S and beyond the last one; not cumulative.
        sum_s: Their sum.
    """

    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, int]]:
        """Prometheus's form: upper bounds, the last one +Inf, each with the number of durations up to it."""
        bounds = [*(f"{bound:g}" for bound in BUCKET_BOUNDS_S), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self.counts), strict=True))


@dataclass(frozen=True, slots=True)
class Series:
    """One value of a metric.

    Args:
        labels: All its labels.
        value: A number, or a Histogram.
    """

    labels: Mapping[str, str]
    value: float | Histogram


@dataclass(frozen=True, slots=True)
class Family:
    """All values of a metric."""

    declaration: Declaration
    series: tuple[Series, ...]


class Metrics(Mapping[str, float]):
    """The samples of the endpoint: a mapping from each sample, in Prometheus's notation, to its value.

    A histogram has the samples `_count` and `_sum`; its buckets are in families().

    Args:
        families: The metrics.
        taken_s: When they were read, by time.monotonic().

    Example:
        >>> metrics = model.session.metrics()
        >>> metrics['coarse_step_seconds_count{worker="0"}']
        120.0
        >>> metrics.total("coarse_pushed_bytes_total", device="md1")
        438000000.0
    """

    def __init__(self, families: Sequence[Family], taken_s: float) -> None:
        self._families = tuple(families)
        self._samples = {_notation(name, labels): value for name, labels, value in self._all()}
        self.taken_s = taken_s

    def families(self) -> tuple[Family, ...]:
        """All metrics that have values."""
        return self._families

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's values, of those with these labels.

        Args:
            name: As at the endpoint: a histogram's ends in `_count` or `_sum`.
            labels: For example `worker="0"`; none for all values.

        Returns:
            0.0 if it has no such values.
        """
        return sum(
            value for each, own, value in self._all() if each == name and labels.items() <= own.items()
        )

    def __getitem__(self, sample: str) -> float:
        return self._samples[sample]

    def __iter__(self) -> Iterator[str]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def _all(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        for family in self._families:
            for series in family.series:
                yield from _samples_of(family.declaration.name, series)


def _samples_of(name: str, series: Series) -> Iterator[tuple[str, Mapping[str, str], float]]:
    if isinstance(series.value, Histogram):
        yield f"{name}_count", series.labels, float(series.value.count)
        yield f"{name}_sum", series.labels, series.value.sum_s
    else:
        yield name, series.labels, series.value


def _notation(name: str, labels: Mapping[str, str]) -> str:
    listed = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{listed}}}"

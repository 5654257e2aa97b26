"""Time by size of one path, from repeated measurements (COARSE paper, section III-E, Fig 14 and 15)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from coarse.profiler.alpha_beta import AlphaBeta

_MAD_TO_SIGMA = 1.4826  # for a normal distribution
_OUTLIER_SIGMAS = 5.0
_SPREADS_OF_DOUBT = 3.0  # two repeats with similar delays may differ by less than their delay
_MOST_BYTES = 1 << 50
_LEAST_TIME_US, _MOST_TIME_US = 1e-6, 1e12
_BYTES_PER_US = 1e3  # for one GB/s; G is 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The measurement at one size.

    Args:
        nbytes: The size, at least 1 and at most 1 PiB.
        time_us: Median of the repeats without outliers, at least a picosecond and at most eleven days.
        spread_us: Uncertainty: the median absolute deviation of the repeats, scaled to a standard deviation; for a
            fastest repeat, its distance from the lower quartile.
        num_repeats: Number of repeats without outliers.

    Raises:
        ValueError: If a number is out of range or NaN.
    """

    nbytes: int
    time_us: float
    spread_us: float = 0.0
    num_repeats: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.nbytes <= _MOST_BYTES or self.num_repeats < 1:
            raise ValueError(
                f"a point needs a size between one byte and 1 PiB, and at least one repeat: {self}"
            )
        if not _LEAST_TIME_US <= self.time_us <= _MOST_TIME_US or not 0 <= self.spread_us <= _MOST_TIME_US:
            raise ValueError(
                f"a time must be above 0, its spread at least 0, both less than eleven days: {self}"
            )

    @classmethod
    def from_repeats(cls, nbytes: int, times_us: Sequence[float]) -> CurvePoint:
        """Takes the median of the repeats without outliers.

        A repeat is an outlier if its distance from the median exceeds five times the scaled median absolute
        deviation. In a normal distribution this is one in a million, but it is typical of a descheduled process.

        Raises:
            ValueError: If `times_us` is empty or contains an invalid time.
        """
        times = np.asarray(times_us, dtype=np.float64)
        if times.size == 0 or not np.all(np.isfinite(times)):
            raise ValueError(
                f"{nbytes} bytes: needs at least one repeat, and each time must be finite: {times_us}"
            )
        kept = times[np.abs(times - np.median(times)) <= _OUTLIER_SIGMAS * _spread(times)]
        # Without spread, all remaining repeats equal the median.
        kept = kept if kept.size else np.median(times, keepdims=True)
        return cls(
            nbytes=nbytes,
            time_us=float(np.median(kept)),
            spread_us=_spread(kept),
            num_repeats=int(kept.size),
        )

    @classmethod
    def from_fastest(cls, nbytes: int, times_us: Sequence[float]) -> CurvePoint:
        """Takes the fastest repeat: for emulated links, where transfers are never too fast, but host delays add.

        Its spread is the distance to the lower quartile, or with fewer than eight repeats to the second fastest. If a
        quarter of the repeats agree, they show the link's own time; otherwise all of them may be delayed.

        Raises:
            ValueError: As for from_repeats().
        """
        cls.from_repeats(nbytes, times_us)  # for its checks
        ordered = sorted(times_us)
        quartile = ordered[min(max(1, len(ordered) // 4), len(ordered) - 1)]
        return cls(
            nbytes=nbytes, time_us=ordered[0], spread_us=quartile - ordered[0], num_repeats=len(ordered)
        )

    @property
    def least_us(self) -> float:
        """The time minus three times its spread: the possible time without the varying delays of the repeats."""
        return max(self.time_us - _SPREADS_OF_DOUBT * self.spread_us, _LEAST_TIME_US)

    @property
    def gbytes_per_s(self) -> float:
        """Bandwidth at this size, in 1e9 bytes per second."""
        return self.nbytes / (self.time_us * _BYTES_PER_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Time by size of one path. Immutable; safe to share between threads.

    Args:
        points: In any order, one per size; stored by size.

    Raises:
        ValueError: If `points` is empty or contains a size twice.
    """

    points: tuple[CurvePoint, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.points, key=lambda point: point.nbytes))
        if not ordered:
            raise ValueError("a curve needs at least one point")
        for point, following in pairwise(ordered):
            if point.nbytes == following.nbytes:
                raise ValueError(f"a curve has two points at {point.nbytes} bytes")
        object.__setattr__(self, "points", ordered)

    @classmethod
    def from_repeats(cls, times_us: Mapping[int, Sequence[float]]) -> Curve:
        """The curve of all repeats in microseconds, by size in bytes (see CurvePoint.from_repeats)."""
        return cls(points=tuple(CurvePoint.from_repeats(nbytes, times) for nbytes, times in times_us.items()))

    @classmethod
    def from_fastest(cls, times_us: Mapping[int, Sequence[float]]) -> Curve:
        """The curve of the fastest repeats, likewise (see CurvePoint.from_fastest)."""
        return cls(points=tuple(CurvePoint.from_fastest(nbytes, times) for nbytes, times in times_us.items()))

    def at_its_least(self) -> Curve:
        """The curve of the least possible times according to the spreads (see CurvePoint.least_us)."""
        return Curve(points=tuple(replace(point, time_us=point.least_us) for point in self.points))

    @property
    def latency_us(self) -> float:
        """Time of the smallest measured size."""
        return self.points[0].time_us

    @property
    def peak_gbytes_per_s(self) -> float:
        """Highest bandwidth of all measured sizes."""
        return max(point.gbytes_per_s for point in self.points)

    def time_us(self, nbytes: float) -> float:
        """Time of `nbytes` bytes.

        Interpolates linearly between measured sizes, which is exact where time = alpha + bytes / beta. Uses the
        smallest size's time below it, and the largest size's bandwidth above it.
        """
        index = bisect_left(self.points, nbytes, key=lambda point: point.nbytes)
        if index == 0:
            return self.points[0].time_us
        if index == len(self.points):
            return self.points[-1].time_us * (nbytes / self.points[-1].nbytes)
        low, high = self.points[index - 1], self.points[index]
        if nbytes == high.nbytes:
            return high.time_us
        fraction = (nbytes - low.nbytes) / (high.nbytes - low.nbytes)
        return low.time_us + fraction * (high.time_us - low.time_us)

    def gbytes_per_s(self, nbytes: float) -> float:
        """Bandwidth at a size, in 1e9 bytes per second."""
        return nbytes / (self.time_us(nbytes) * _BYTES_PER_US)

    def fit(self) -> AlphaBeta:
        """Fits time = alpha + bytes / beta by least squares of relative errors.

        With absolute errors, the largest sizes would determine the latency, although their noise exceeds it. Neither
        alpha nor 1 / beta becomes negative. A single point is fitted by bandwidth alone.
        """
        sizes = np.array([point.nbytes for point in self.points], dtype=np.float64)
        times = np.array([point.time_us for point in self.points], dtype=np.float64)
        alpha_us, us_per_byte = _fit_line(sizes, times)
        errors = (alpha_us + us_per_byte * sizes - times) / times
        return AlphaBeta(
            alpha_us=alpha_us,
            beta_gbytes_per_s=1 / (us_per_byte * _BYTES_PER_US) if us_per_byte > 0 else math.inf,
            relative_error=float(np.sqrt(np.mean(errors**2))),
        )


def _spread(times: NDArray[np.float64]) -> float:
    return _MAD_TO_SIGMA * float(np.median(np.abs(times - np.median(times))))


def _fit_line(sizes: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float]:
    """Non-negative (intercept, slope) with the least sum of squared relative errors."""
    constant, linear = 1 / times, sizes / times
    if sizes.size > 1:
        scale = float(sizes.max())  # columns of similar magnitude, for precision
        (alpha, slope), *_ = np.linalg.lstsq(
            np.column_stack((constant, linear / scale)), np.ones_like(times), rcond=None
        )
        if alpha >= 0 and slope >= 0:
            return float(alpha), float(slope / scale)
        if slope < 0:
            return float(constant.sum() / (constant @ constant)), 0.0
    return 0.0, float(linear.sum() / (linear @ linear))

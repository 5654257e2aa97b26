"""Times calls, and computes a benchmark's figures from the raw seconds of every worker."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MICROSECONDS = 1e6


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collects garbage before the context, and none within it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(action: Callable[[], object], iterations: int) -> list[float]:
    """Returns the seconds of each call of `action`, after one uncounted call, without garbage collection."""
    clock = time.perf_counter
    seconds = [0.0] * iterations
    with no_garbage_collection():
        action()  # synchronises workers, which received the command at different times
        for index in range(iterations):
            started = clock()
            action()
            seconds[index] = clock() - started
    return seconds


def slowest_worker(seconds_by_worker: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Seconds of each iteration on its slowest worker.

    Raises:
        ValueError: If there is no worker or no iteration, or numbers of iterations differ between workers.
    """
    lengths = {len(seconds) for seconds in seconds_by_worker}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"need the same positive number of iterations of every worker, got {sorted(lengths)}"
        )
    slowest: NDArray[np.float64] = np.asarray(seconds_by_worker, dtype=np.float64).max(axis=0)
    return slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Distribution of one quantity over iterations, in microseconds; percentiles interpolate linearly."""

    min_us: float
    p50_us: float
    p99_us: float
    iterations: int

    @classmethod
    def from_seconds(cls, seconds: Sequence[float] | NDArray[np.float64]) -> Timing:
        """Summarises iterations given in seconds.

        Raises:
            ValueError: If there are no iterations.
        """
        values_us = np.asarray(seconds, dtype=np.float64) * _MICROSECONDS
        if values_us.size == 0:
            raise ValueError("no iterations to summarise")
        p50_us, p99_us = np.percentile(values_us, [50, 99])
        return cls(
            min_us=float(values_us.min()),
            p50_us=float(p50_us),
            p99_us=float(p99_us),
            iterations=int(values_us.size),
        )

    def in_ms(self, name: str) -> dict[str, float]:
        """Milliseconds for a record: the median as `name`_ms, with the minimum and the 99th percentile."""
        times_us = {name: self.p50_us, f"{name}_min": self.min_us, f"{name}_p99": self.p99_us}
        return {f"{each}_ms": time_us / 1e3 for each, time_us in times_us.items()}

    def algbw_gbytes_per_s(self, nbytes: int) -> float:
        """Algorithm bandwidth: bytes of one worker's tensor divided by the median time; G is 1e9, B is bytes."""
        return nbytes / self.p50_us / 1e3


def iterations_within(budget_s: float, seconds_each: float, *, at_least: int, at_most: int) -> int:
    """Number of iterations of `seconds_each` that fit into `budget_s`, within bounds."""
    fitting = int(budget_s / max(seconds_each, 1e-9))
    return max(at_least, min(at_most, fitting))

"""When a worker may go on with the parameters that it has pulled, and when it must pull them again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """What a worker's reads of parameters were.

    Args:
        hits: Of values that the worker had.
        misses: For which it pulled all parameters.
        largest_lag: Of all reads, how many updates a value that was used did not know of.
        pulled_bytes: By all misses together.
    """

    hits: int
    misses: int
    largest_lag: int
    pulled_bytes: int


class ParameterCache:
    """One worker's bookkeeping of the version at which it has pulled parameters.

    All parameters of a model have one version: the number of updates they have seen. So one counter that goes up
    invalidates them all, whatever their number, and nobody has to be told (CARVE's epoch counter, and the parameter
    cache of DENSE). A read is a hit if and only if version >= current - staleness.

    Args:
        staleness: How many updates a value may not know of; 0 is exact.
        num_bytes: Of all parameters.

    Raises:
        ValueError: If staleness is negative.
    """

    def __init__(self, *, staleness: int, num_bytes: int) -> None:
        if staleness < 0:
            raise ValueError(f"staleness={staleness} must be at least 0; 0 reads exact parameters")
        self._staleness = staleness
        self._num_bytes = num_bytes
        self._version: int | None = None
        self._hits = self._misses = self._largest_lag = 0

    @property
    def staleness(self) -> int:
        """How many updates a value may not know of."""
        return self._staleness

    def is_hit(self, current: int) -> bool:
        """Counts a read at version `current`; False has the caller pull, and tell filled()."""
        lag = None if self._version is None else current - self._version
        if lag is None or lag > self._staleness:
            self._misses += 1
            return False
        self._hits += 1
        self._largest_lag = max(self._largest_lag, lag)
        return True

    def filled(self, version: int) -> None:
        """What the worker holds is of this version from now on."""
        self._version = version

    def statistics(self) -> CacheStatistics:
        """Of all reads so far."""
        return CacheStatistics(
            hits=self._hits,
            misses=self._misses,
            largest_lag=self._largest_lag,
            pulled_bytes=self._misses * self._num_bytes,
        )

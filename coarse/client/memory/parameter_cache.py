"""Decides whether a worker may use the parameters that it has pulled, or must pull them again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Statistics of a worker's reads of parameters.

    Args:
        hits: Reads of values that the worker had.
        misses: Reads for which it pulled all parameters.
        largest_lag: Largest number of updates that a used value lacked.
        pulled_bytes: Bytes pulled by all misses together.
    """

    hits: int
    misses: int
    largest_lag: int
    pulled_bytes: int


class ParameterCache:
    """Records the version of the parameters that one worker has pulled.

    All parameters of a model share one version: the number of updates. Thus incrementing one counter invalidates them
    all without a message (CARVE's epoch counter, and the parameter cache of DENSE). A read is a hit if and only if
    version >= current - staleness.

    Args:
        staleness: Number of updates that a value may lack; 0 is exact.
        num_bytes: Size of all parameters in bytes.

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
        """Number of updates that a value may lack."""
        return self._staleness

    def is_hit(self, current: int) -> bool:
        """Counts a read at version `current`; on False the caller must pull, then call filled()."""
        lag = None if self._version is None else current - self._version
        if lag is None or lag > self._staleness:
            self._misses += 1
            return False
        self._hits += 1
        self._largest_lag = max(self._largest_lag, lag)
        return True

    def filled(self, version: int) -> None:
        """Records that the worker now holds this version."""
        self._version = version

    def statistics(self) -> CacheStatistics:
        """Statistics of all reads so far."""
        return CacheStatistics(
            hits=self._hits,
            misses=self._misses,
            largest_lag=self._largest_lag,
            pulled_bytes=self._misses * self._num_bytes,
        )

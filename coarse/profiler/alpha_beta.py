"""The latency-bandwidth model of a path."""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES_PER_US = 1e3  # for one GB/s; G is 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """A path's model: time = alpha + bytes / beta.

    Args:
        alpha_us: Latency.
        beta_gbytes_per_s: Bandwidth, in 1e9 bytes per second; infinite if time does not grow with size.
        relative_error: Root mean square of (model - measured) / measured over the fitted sizes.

    Raises:
        ValueError: If a number is negative or NaN, or the bandwidth is 0.
    """

    alpha_us: float
    beta_gbytes_per_s: float
    relative_error: float = 0.0

    def __post_init__(self) -> None:
        good = 0 <= self.alpha_us < math.inf and self.beta_gbytes_per_s > 0
        if not good or not 0 <= self.relative_error < math.inf:
            raise ValueError(f"a path needs a latency of at least 0 and a bandwidth above 0: {self}")

    def time_us(self, nbytes: float) -> float:
        """Time of a transfer of `nbytes` bytes."""
        return self.alpha_us + nbytes / (self.beta_gbytes_per_s * BYTES_PER_US)

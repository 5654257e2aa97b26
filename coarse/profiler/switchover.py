"""The size above which another path or another collective is faster: predicted and measured.

Sources: Oden's dissertation on direct communication of distributed GPUs (hybrid write, section 3; all-gather and
all-to-all reductions, section 6.8). Pure functions of their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coarse.profiler.alpha_beta import BYTES_PER_US, AlphaBeta

if TYPE_CHECKING:  # a client needs routes, but not numpy
    from coarse.profiler.curve import Curve


def predict_crossing(small: AlphaBeta, large: AlphaBeta) -> float | None:
    """The size in bytes above which `large` is the faster path.

    S* = (alpha_s - alpha_d) beta_d beta_s / (beta_s - beta_d), where d stands for `small` (direct) and s for `large`
    (staged): alpha_d + S/beta_d = alpha_s + S/beta_s gives S (1/beta_d - 1/beta_s) = alpha_s - alpha_d. S* is
    positive only if both differences have the same sign; `large` is faster above it only if that sign is plus.

    Returns:
        0 if `large` is never slower, None if it never becomes faster.
    """
    more_latency_us = large.alpha_us - small.alpha_us
    # 1/beta instead of beta, so that infinite bandwidth needs no special case.
    saved_us_per_byte = (1 / small.beta_gbytes_per_s - 1 / large.beta_gbytes_per_s) / BYTES_PER_US
    if more_latency_us <= 0 and saved_us_per_byte >= 0:
        return 0.0
    if more_latency_us <= 0 or saved_us_per_byte <= 0:
        return None
    return more_latency_us / saved_us_per_byte


def measure_crossing(small: Curve, large: Curve) -> int | None:
    """The smallest size in bytes at and above which `large` is never slower than `small`, by the measured curves.

    The first crossing after which `large` stays faster; all sizes before it, including noise, belong to `small`.

    Returns:
        0 if `large` is never slower; None if it is slower at the largest measured size.
    """
    sizes = sorted({point.nbytes for curve in (small, large) for point in curve.points})
    lead_us = [small.time_us(nbytes) - large.time_us(nbytes) for nbytes in sizes]
    if lead_us[-1] < 0:
        return None
    behind = [i for i, lead in enumerate(lead_us) if lead < 0]
    if not behind:
        return 0
    last = behind[-1]
    # Both curves, and thus their difference, are linear between neighbouring sizes.
    fraction = -lead_us[last] / (lead_us[last + 1] - lead_us[last])
    crossing = math.ceil(sizes[last] + fraction * (sizes[last + 1] - sizes[last]))
    return min(max(crossing, sizes[last] + 1), sizes[last + 1])


def all_gather(path: AlphaBeta, num_workers: int) -> AlphaBeta:
    """All-reduce of S bytes in which each worker sends its S bytes to all others and reduces all of them itself.

    One synchronisation; each worker sends (N-1) S bytes.
    """
    _check_workers(num_workers)
    return AlphaBeta(alpha_us=path.alpha_us, beta_gbytes_per_s=path.beta_gbytes_per_s / (num_workers - 1))


def all_to_all(path: AlphaBeta, num_workers: int) -> AlphaBeta:
    """All-reduce of S bytes in which each worker reduces 1/N of them and sends the result to all others.

    Two synchronisations; each worker sends 2 (N-1)/N S bytes.
    """
    _check_workers(num_workers)
    return AlphaBeta(
        alpha_us=2 * path.alpha_us,
        beta_gbytes_per_s=path.beta_gbytes_per_s * num_workers / (2 * (num_workers - 1)),
    )


def ring(path: AlphaBeta, num_workers: int) -> AlphaBeta:
    """All-reduce of S bytes in which 1/N of them at a time goes around a ring.

    2 (N-1) synchronisations; each worker sends 2 (N-1)/N S bytes, all to the next worker, so that no other link is
    used.
    """
    _check_workers(num_workers)
    return AlphaBeta(
        alpha_us=2 * (num_workers - 1) * path.alpha_us,
        beta_gbytes_per_s=path.beta_gbytes_per_s * num_workers / (2 * (num_workers - 1)),
    )


def predict_all_to_all_crossing(path: AlphaBeta, num_workers: int) -> float | None:
    """The tensor size in bytes above which all-to-all is faster than all-gather: alpha beta N / ((N-1) (N-2)).

    Returns:
        None with two workers: all-gather then sends no more bytes and synchronises once less.
    """
    return predict_crossing(all_gather(path, num_workers), all_to_all(path, num_workers))


def slowest_path(paths: Iterable[AlphaBeta]) -> AlphaBeta:
    """A path with the highest latency and the lowest bandwidth of all, for which an all-reduce over them waits.

    Raises:
        ValueError: If `paths` is empty.
    """
    paths = list(paths)
    if not paths:
        raise ValueError("paths is empty")
    return AlphaBeta(
        alpha_us=max(path.alpha_us for path in paths),
        beta_gbytes_per_s=min(path.beta_gbytes_per_s for path in paths),
        relative_error=max(path.relative_error for path in paths),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchOver:
    """A predicted and a measured crossing; None for a crossing that does not exist."""

    predicted_bytes: float | None
    measured_bytes: int | None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; None unless both are sizes above 0."""
        if not self.predicted_bytes or not self.measured_bytes:
            return None
        return self.predicted_bytes / self.measured_bytes


def compare_crossings(small: Curve, large: Curve) -> SwitchOver:
    """Predicts a crossing from the alpha-beta fits of two curves, and finds it in the measured curves."""
    return SwitchOver(
        predicted_bytes=predict_crossing(small.fit(), large.fit()),
        measured_bytes=measure_crossing(small, large),
    )


def _check_workers(num_workers: int) -> None:
    if num_workers < 2:
        raise ValueError(f"num_workers={num_workers}: an all-reduce needs at least two workers")

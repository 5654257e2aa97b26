"""From which size on another path, or another collective, is the faster one: predicted and measured.

Sources: Oden's dissertation on direct communication of distributed GPUs (hybrid write, section 3; all-gather and
all-to-all reductions, section 6.8). Pure functions of their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coarse.profiler.alpha_beta import BYTES_PER_US, AlphaBeta

if TYPE_CHECKING:  # a client needs routes but no numpy
    from coarse.profiler.curve import Curve


def predict_crossing(small: AlphaBeta, large: AlphaBeta) -> float | None:
    """The size in bytes from which on `large` is the faster path.

    S* = (alpha_s - alpha_d) beta_d beta_s / (beta_s - beta_d), d standing for `small` (direct), s for `large`
    (staged): alpha_d + S/beta_d = alpha_s + S/beta_s gives S (1/beta_d - 1/beta_s) = alpha_s - alpha_d. A positive
    S* needs both differences to have the same sign; `large` wins beyond it only if that sign is plus.

    Returns:
        0 if `large` is never the slower one, None if it never becomes the faster one.
    """
    more_latency_us = large.alpha_us - small.alpha_us
    # 1/beta rather than beta, so that an infinite bandwidth needs no case of its own.
    saved_us_per_byte = (1 / small.beta_gbytes_per_s - 1 / large.beta_gbytes_per_s) / BYTES_PER_US
    if more_latency_us <= 0 and saved_us_per_byte >= 0:
        return 0.0
    if more_latency_us <= 0 or saved_us_per_byte <= 0:
        return None
    return more_latency_us / saved_us_per_byte


def measure_crossing(small: Curve, large: Curve) -> int | None:
    """The smallest size in bytes from which on `large` is never slower than `small`, by the measured curves.

    The first crossing beyond which `large` stays ahead: what lies before it, noise included, belongs to `small`.

    Returns:
        0 if `large` is never the slower one; None if it is slower at the largest size that was measured.
    """
    sizes = sorted({point.nbytes for curve in (small, large) for point in curve.points})
    lead_us = [small.time_us(nbytes) - large.time_us(nbytes) for nbytes in sizes]
    if lead_us[-1] < 0:
        return None
    behind = [i for i, lead in enumerate(lead_us) if lead < 0]
    if not behind:
        return 0
    last = behind[-1]
    # Both curves are straight between neighbouring sizes, and so is their difference.
    fraction = -lead_us[last] / (lead_us[last + 1] - lead_us[last])
    crossing = math.ceil(sizes[last] + fraction * (sizes[last + 1] - sizes[last]))
    return min(max(crossing, sizes[last] + 1), sizes[last + 1])


def all_gather(path: AlphaBeta, num_workers: int) -> AlphaBeta:
    """All-reduce of S bytes in which each worker sends its S bytes to all others, and reduces by itself.

    One synchronisation, (N-1) S bytes out of each worker.
    """
    _check_workers(num_workers)
    return AlphaBeta(alpha_us=path.alpha_us, beta_gbytes_per_s=path.beta_gbytes_per_s / (num_workers - 1))


def all_to_all(path: AlphaBeta, num_workers: int) -> AlphaBeta:
    """All-reduce of S bytes in which each worker reduces an N-th of them and sends that to all others.

    Two synchronisations, 2 (N-1)/N S bytes out of each worker.
    """
    _check_workers(num_workers)
    return AlphaBeta(
        alpha_us=2 * path.alpha_us,
        beta_gbytes_per_s=path.beta_gbytes_per_s * num_workers / (2 * (num_workers - 1)),
    )


def ring(path: AlphaBeta, num_workers: int) -> AlphaBeta:
    """All-reduce of S bytes in which an N-th of them at a time goes around.

    2 (N-1) synchronisations, 2 (N-1)/N S bytes out of each worker: all to the next one, so that no other link is
    used.
    """
    _check_workers(num_workers)
    return AlphaBeta(
        alpha_us=2 * (num_workers - 1) * path.alpha_us,
        beta_gbytes_per_s=path.beta_gbytes_per_s * num_workers / (2 * (num_workers - 1)),
    )


def predict_all_to_all_crossing(path: AlphaBeta, num_workers: int) -> float | None:
    """The tensor size in bytes from which on all-to-all beats all-gather: alpha beta N / ((N-1) (N-2)).

    Returns:
        None with two workers: there all-gather sends no more bytes and synchronises once less.
    """
    return predict_crossing(all_gather(path, num_workers), all_to_all(path, num_workers))


def slowest_path(paths: Iterable[AlphaBeta]) -> AlphaBeta:
    """A path as late and as narrow as the worst of all, which an all-reduce over them waits for.

    Raises:
        ValueError: If there are no paths.
    """
    paths = list(paths)
    if not paths:
        raise ValueError("there are no paths")
    return AlphaBeta(
        alpha_us=max(path.alpha_us for path in paths),
        beta_gbytes_per_s=min(path.beta_gbytes_per_s for path in paths),
        relative_error=max(path.relative_error for path in paths),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchOver:
    """A predicted crossing beside the measured one; None where there is none."""

    predicted_bytes: float | None
    measured_bytes: int | None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; None unless both are sizes above 0."""
        if not self.predicted_bytes or not self.measured_bytes:
            return None
        return self.predicted_bytes / self.measured_bytes


def compare_crossings(small: Curve, large: Curve) -> SwitchOver:
    """Predicts a crossing from the alpha-beta fits of two curves and looks it up in the curves themselves."""
    return SwitchOver(
        predicted_bytes=predict_crossing(small.fit(), large.fit()),
        measured_bytes=measure_crossing(small, large),
    )


def _check_workers(num_workers: int) -> None:
    if num_workers < 2:
        raise ValueError(f"num_workers={num_workers}: an all-reduce needs at least two workers")

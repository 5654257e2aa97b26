"""Repeats a run on emulated links with more time dilation until the emulation keeps pace, or refuses it.

Figures of links that this machine could not emulate are wrong without a sign of it. So each run reports how late
transfers were noticed (EmulatedSession.pacing()), as a share of what the run measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from coarse.bench.harness.commands import BenchError
from coarse.emulation.pacing import PacingReport

T = TypeVar("T")

MOST_ERROR = 0.02
"""Largest accepted pacing error. Two runs that are compared may then differ by 4% without a cause, which is less than
the 5 points by which the paper's figures are met (experiments/fig17_blocked_time)."""

MOST_DOUBLINGS = 3
"""Most repeats of a run that did not keep pace, each with twice the time dilation of the one before."""


class PaceError(BenchError):
    """This machine could not emulate links fast enough; there are no figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """How exactly the links of a run were paced.

    Args:
        lateness_us: Average delay of the host's processes, in the emulated machine's time.
        error: The delay as a share of the measured time: the run's pacing error.
        time_dilation: Real seconds per emulated second.
    """

    lateness_us: float
    error: float
    time_dilation: float

    def as_json(self) -> dict[str, float]:
        """The fields of a record."""
        return {
            "time_dilation": self.time_dilation,
            "lateness_us": self.lateness_us,
            "pacing_error": self.error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced(Generic[T]):
    """The result of a run on emulated links, and their pacing."""

    value: T
    pacing: Pacing


def lateness_us(before: PacingReport, after: PacingReport, time_dilation: float) -> float:
    """Average delay of the arrivals between two reports, in the emulated machine's microseconds; 0 without one."""
    num_arrivals = after.num_arrivals - before.num_arrivals
    total_us = after.num_arrivals * after.mean_lateness_us - before.num_arrivals * before.mean_lateness_us
    return total_us / num_arrivals / time_dilation if num_arrivals else 0.0


def keep_pace(
    what: str,
    measure: Callable[[float], Paced[T]],
    *,
    time_dilation: float,
    most_error: float = MOST_ERROR,
    most_doublings: int = MOST_DOUBLINGS,
) -> Paced[T]:
    """Measures; then, while the pacing error is too large, again with twice the time dilation.

    Args:
        what: Name of the run, for the error.
        measure: Runs with the time dilation of its argument.
        time_dilation: Of the first run.
        most_error: Largest accepted pacing error.
        most_doublings: Most repeats.

    Raises:
        PaceError: If the last run did not keep pace either.
    """
    for _ in range(most_doublings + 1):
        paced = measure(time_dilation)
        if paced.pacing.error <= most_error:
            return paced
        time_dilation *= 2
    pacing = paced.pacing
    raise PaceError(
        f"{what}: this machine cannot emulate the links in time: with time dilated {pacing.time_dilation:g} times, "
        f"transfers were {pacing.lateness_us:.3g} us late on average, a pacing error of {pacing.error:.1%}; "
        f"at most {most_error:.0%} is accepted. End other work on this machine, or dilate time more"
    )

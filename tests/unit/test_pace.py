"""Runs on emulated links that did not keep pace are repeated with more time dilation, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.bench.pace import MOST_DOUBLINGS, MOST_ERROR, Paced, PaceError, Pacing, keep_pace, lateness_us
from coarse.emulation.pacing import PacingReport


def runs_with(errors):
    """Runs with these pacing errors, one after the other; the value is the number of the run."""
    numbers = iter(enumerate(errors))

    def run(time_dilation):
        number, error = next(numbers)
        pacing = Pacing(lateness_us=7.0, error=error, time_dilation=time_dilation)
        return Paced(value=number, pacing=pacing)

    return run


@given(st.lists(st.floats(0, 1), min_size=MOST_DOUBLINGS + 1))
def test_the_first_run_that_keeps_pace_counts(errors):
    first = next((i for i, error in enumerate(errors[: MOST_DOUBLINGS + 1]) if error <= MOST_ERROR), None)
    if first is None:
        with pytest.raises(PaceError):
            keep_pace("run", runs_with(errors), time_dilation=10)
    else:
        paced = keep_pace("run", runs_with(errors), time_dilation=10)
        assert (paced.value, paced.pacing.time_dilation) == (first, 10 * 2**first)


def test_a_refusal_says_how_late_and_what_to_do():
    with pytest.raises(
        PaceError,
        match=r"ring on p3: this machine .* dilated 20 times, transfers were 7 us late on average, "
        r"a pacing error of 50.0%; at most 10% is accepted. End other work",
    ):
        keep_pace("ring on p3", runs_with([0.9, 0.5]), time_dilation=10, most_error=0.1, most_doublings=1)


def test_lateness_is_that_of_the_arrivals_between_two_reports():
    before = PacingReport(num_arrivals=10, mean_lateness_us=100.0)
    after = PacingReport(num_arrivals=30, mean_lateness_us=50.0)
    assert lateness_us(before, after, 10.0) == pytest.approx((1500 - 1000) / 20 / 10)
    assert lateness_us(before, before, 10.0) == 0.0

"""Switch-over sizes: predicted from alpha and beta, and read from curves; equal for linear curves."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning import SIZES, curve_of, curves, line, models, path

from coarse.profiler.alpha_beta import AlphaBeta
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.switchover import (
    SwitchOver,
    all_gather,
    all_to_all,
    compare_crossings,
    measure_crossing,
    predict_all_to_all_crossing,
    predict_crossing,
    ring,
    slowest_path,
)


def test_the_formula_of_the_source():
    direct, staged = path(3, 1), path(10, 3)
    expected = (10 - 3) * 1e3 * 3e3 / (3e3 - 1e3)  # bytes per microsecond
    assert predict_crossing(direct, staged) == pytest.approx(expected) == pytest.approx(10500)


@given(models, models)
def test_both_paths_take_equally_long_at_the_crossing_and_the_large_one_wins_beyond(small, large):
    crossing = predict_crossing(small, large)
    sizes = [0, 1, 1 << 10, 1 << 20, 1 << 30, 1 << 40]
    if crossing is None:
        assert all(large.time_us(n) >= small.time_us(n) for n in sizes) or (
            large.alpha_us <= small.alpha_us and large.beta_gbytes_per_s < small.beta_gbytes_per_s
        )
        return
    assert large.time_us(crossing) == pytest.approx(small.time_us(crossing)) or crossing == 0
    for n in (2 * crossing, 2 * crossing + (1 << 20)):
        assert large.time_us(n) <= small.time_us(n) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("small", "large", "crossing"),
    [
        (path(1, 1), path(1, 1), 0),
        (path(1, 1), path(1, 2), 0),
        (path(2, 1), path(1, 1), 0),
        (path(1, 1), path(2, 1), None),
        (path(1, 2), path(2, 1), None),
        (path(2, 2), path(1, 1), None),  # the lines cross, but it is the small one that wins beyond
        (path(1, 1), path(2, float("inf")), 1000),
    ],
)
def test_signs(small, large, crossing):
    assert predict_crossing(small, large) == crossing


@given(curves, curves)
def test_a_measured_crossing_is_the_first_beyond_which_the_large_path_stays_ahead(small, large):
    crossing = measure_crossing(small, large)
    sizes = sorted({point.nbytes for curve in (small, large) for point in curve.points})
    if crossing is None:
        assert large.time_us(sizes[-1]) > small.time_us(sizes[-1])
        return
    for n in {crossing, *(n for n in sizes if n >= crossing), sizes[-1] * 16}:
        assert large.time_us(n) <= small.time_us(n) * (1 + 1e-6)
    if crossing > 1:
        before = crossing - 1
        assert large.time_us(before) > small.time_us(before) * (1 - 1e-6)


@given(models, models)
def test_on_lines_measured_and_predicted_crossings_agree(small, large):
    predicted = predict_crossing(small, large)
    measured = measure_crossing(curve_of(small), curve_of(large))
    assume(predicted is None or predicted == 0 or 2 * SIZES[0] < predicted < SIZES[-1] / 2)
    if predicted and measured:
        assert abs(measured - predicted) <= 2 + 1e-6 * predicted
        compared = compare_crossings(curve_of(small), curve_of(large))
        assert compared.measured_bytes == measured


def test_a_comparison_of_lines_agrees():
    compared = compare_crossings(line(3, 1), line(103, 3))
    assert compared.ratio == pytest.approx(1, abs=1e-4)
    assert compared.measured_bytes == 150_000


@pytest.mark.parametrize(("predicted", "measured"), [(None, 5), (5.0, None), (0.0, 5), (5.0, 0)])
def test_there_is_no_ratio_without_two_sizes(predicted, measured):
    assert SwitchOver(predicted_bytes=predicted, measured_bytes=measured).ratio is None


def test_an_early_lead_does_not_count():
    times = {4096: 9, 8192: 30, 16384: 20}
    large = Curve(points=tuple(CurvePoint(nbytes=n, time_us=t) for n, t in times.items()))
    small = Curve(points=tuple(CurvePoint(nbytes=n, time_us=25.0) for n in times))
    assert measure_crossing(small, large) == 8192 + 4096


@given(models, st.integers(3, 64))
def test_all_to_all_beats_all_gather_from_the_size_of_the_closed_form_on(link, n):
    assume(link.alpha_us > 0)
    beta = link.beta_gbytes_per_s * 1e3
    expected = link.alpha_us * beta * n / ((n - 1) * (n - 2))
    assert predict_all_to_all_crossing(link, n) == pytest.approx(expected)


@given(models)
def test_two_workers_never_gain_from_all_to_all(link):
    assume(link.alpha_us > 0)
    assert predict_all_to_all_crossing(link, 2) is None


def test_bytes_and_synchronisations_of_the_collectives():
    link = path(10, 1)  # 1000 bytes a microsecond
    assert all_gather(link, 4).time_us(8000) == pytest.approx(10 + 3 * 8)
    assert all_to_all(link, 4).time_us(8000) == pytest.approx(20 + 2 * 3 / 4 * 8)


@pytest.mark.parametrize("collective", [all_gather, all_to_all])
def test_one_worker_has_nobody_to_reduce_with(collective):
    with pytest.raises(ValueError, match="at least two workers"):
        collective(path(1, 1), 1)


@pytest.mark.parametrize("wrong", [(-1, 1), (float("nan"), 1), (1, 0), (1, -1), (1, float("nan"))])
def test_paths_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="latency of at least 0"):
        AlphaBeta(alpha_us=wrong[0], beta_gbytes_per_s=wrong[1])


@given(st.lists(models, min_size=1, max_size=6))
def test_an_all_reduce_waits_for_the_worst_latency_and_the_worst_bandwidth(paths):
    worst = slowest_path(paths)
    for nbytes in (0, 4096, 1 << 26):
        assert worst.time_us(nbytes) >= max(path.time_us(nbytes) for path in paths) * (1 - 1e-12)
    assert worst.alpha_us in {path.alpha_us for path in paths}


def test_no_paths_have_no_worst():
    with pytest.raises(ValueError, match="paths is empty"):
        slowest_path([])


@pytest.mark.parametrize("num_workers", [2, 3, 4, 8])
def test_a_ring_sends_as_much_as_all_to_all_in_more_turns(num_workers):
    link = path(5, 10)
    around, exchanged = ring(link, num_workers), all_to_all(link, num_workers)
    assert around.beta_gbytes_per_s == exchanged.beta_gbytes_per_s
    assert around.alpha_us == (num_workers - 1) * exchanged.alpha_us

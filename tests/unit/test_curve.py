"""Curve: medians without outliers, linear between sizes, fitted by relative error."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import SIZES, curve_of, curves, line, models, points, sizes, times_us

from coarse.profiler.curve import Curve, CurvePoint


def test_a_point_is_the_median_without_outliers():
    times = [10.0, 11.0, 12.0, 13.0, 14.0, 9000.0, 8000.0]
    point = CurvePoint.from_repeats(4096, times)
    assert (point.time_us, point.num_repeats) == (12.0, 5)
    assert point.spread_us == pytest.approx(1.4826)


def test_outliers_of_both_sides_are_dropped():
    assert CurvePoint.from_repeats(1, [0.001, 20, 21, 22, 23, 24, 500]).num_repeats == 5


def test_repeats_without_any_spread_but_one():
    point = CurvePoint.from_repeats(1, [7.0, 7.0, 7.0, 7.0, 90.0])
    assert (point.time_us, point.spread_us, point.num_repeats) == (7.0, 0.0, 4)


@given(st.lists(times_us, min_size=1, max_size=40), st.randoms())
def test_the_order_of_repeats_does_not_matter(repeats, random):
    shuffled = repeats.copy()
    random.shuffle(shuffled)
    point = CurvePoint.from_repeats(64, repeats)
    assert point == CurvePoint.from_repeats(64, shuffled)
    assert min(repeats) <= point.time_us <= max(repeats)


@given(st.lists(st.floats(90, 110), min_size=11, max_size=40), st.lists(st.floats(1e6, 1e7), max_size=5))
def test_a_few_wild_repeats_do_not_move_the_time(calm, wild):
    assert 90 <= CurvePoint.from_repeats(64, calm + wild).time_us <= 110


@pytest.mark.parametrize("wrong", [[], [math.nan, 1.0], [math.inf], [-1.0], [0.0]])
def test_repeats_that_are_no_times_are_refused(wrong):
    with pytest.raises(ValueError, match=r"repeat|time must be above 0"):
        CurvePoint.from_repeats(64, wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"nbytes": 0}, {"time_us": 0.0}, {"time_us": math.nan}, {"spread_us": -1.0}, {"num_repeats": 0}],
)
def test_points_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=r"point needs|time must"):
        CurvePoint(**{"nbytes": 1, "time_us": 1.0, **wrong})


@pytest.mark.parametrize(
    ("repeats", "spread_us"),
    [
        ([10.0], 0.0),
        ([12.0, 10.0], 2.0),
        ([90.0, 10.0, 11.0, 80.0], 1.0),
        ([10.0, 10.5, 11.0, 12.0, 90.0, 91.0, 92.0, 93.0], 1.0),
        ([10.0, 40.0, 41.0, 42.0, 43.0, 44.0, 45.0, 46.0], 31.0),
    ],
)
def test_a_fastest_repeat_is_as_sure_as_the_lower_quartile_is_near(repeats, spread_us):
    point = CurvePoint.from_fastest(4096, repeats)
    assert (point.time_us, point.spread_us, point.num_repeats) == (10.0, spread_us, len(repeats))
    assert point.least_us == max(10.0 - 3 * spread_us, 1e-6)


def test_curves_are_neither_empty_nor_have_a_size_twice():
    with pytest.raises(ValueError, match="at least one point"):
        Curve(points=())
    with pytest.raises(ValueError, match="two points at 64 bytes"):
        Curve(points=(CurvePoint(nbytes=64, time_us=1.0), CurvePoint(nbytes=64, time_us=2.0)))


@given(st.lists(points, min_size=1, max_size=8, unique_by=lambda point: point.nbytes), st.randoms())
def test_the_order_of_points_does_not_matter(drawn, random):
    curve = Curve(points=tuple(drawn))
    random.shuffle(drawn)
    assert curve == Curve(points=tuple(drawn))


@given(models, sizes)
def test_interpolation_is_exact_where_time_is_alpha_plus_bytes_over_beta(model, nbytes):
    nbytes = min(max(nbytes, SIZES[0]), SIZES[-1])
    assert curve_of(model).time_us(nbytes) == pytest.approx(model.time_us(nbytes))


@given(curves)
def test_measured_sizes_are_as_measured(curve):
    for point in curve.points:
        assert curve.time_us(point.nbytes) == point.time_us
        assert curve.gbytes_per_s(point.nbytes) == point.gbytes_per_s


@given(curves, sizes)
def test_between_two_sizes_lie_times_between_theirs(curve, nbytes):
    times = [point.time_us for point in curve.points]
    if nbytes <= curve.points[-1].nbytes:
        assert min(times) * (1 - 1e-9) <= curve.time_us(nbytes) <= max(times) * (1 + 1e-9)


def test_outside_the_measured_sizes():
    curve = line(10, 2, sizes=(1000, 2000))
    assert curve.time_us(0) == curve.time_us(1000) == curve.latency_us == 10.5
    assert curve.time_us(8000) == 4 * curve.time_us(2000)
    assert curve.peak_gbytes_per_s == curve.gbytes_per_s(1 << 40) == pytest.approx(2000 / 11e3)


@given(models)
def test_the_fit_finds_alpha_and_beta(model):
    fit = curve_of(model).fit()
    assert fit.relative_error < 1e-6
    for size in SIZES:
        assert fit.time_us(size) == pytest.approx(model.time_us(size), rel=1e-6)


@given(curves)
def test_any_curve_can_be_fitted(curve):
    fit = curve.fit()
    assert fit.alpha_us >= 0
    assert fit.beta_gbytes_per_s > 0
    if len(curve.points) == 1:
        assert fit.time_us(curve.points[0].nbytes) == pytest.approx(curve.points[0].time_us)


@given(curves)
def test_no_other_line_fits_better(curve):
    """The fit is the least one of all non-negative lines, so none of its neighbours is better."""
    fit = curve.fit()
    us_per_byte = fit.time_us(1) - fit.time_us(0) if math.isfinite(fit.beta_gbytes_per_s) else 0.0

    def error(alpha_us, slope):
        return math.sqrt(
            np.mean([((alpha_us + slope * p.nbytes - p.time_us) / p.time_us) ** 2 for p in curve.points])
        )

    for alpha_factor, slope_factor in [(1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)]:
        other = error(fit.alpha_us * alpha_factor, us_per_byte * slope_factor)
        assert fit.relative_error <= other * (1 + 1e-6) + 1e-6


def test_the_error_tells_a_bad_fit():
    bent = Curve(points=tuple(CurvePoint(nbytes=n, time_us=math.sqrt(n)) for n in SIZES))
    assert line(10, 5).fit().relative_error < 1e-9
    assert bent.fit().relative_error > 0.2

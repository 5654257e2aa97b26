"""Statistics of a benchmark: an iteration lasts as long as on its slowest worker."""

from __future__ import annotations

import pytest

from coarse.bench.timing import Timing, iterations_within, slowest_worker


def test_iteration_lasts_as_long_as_on_its_slowest_worker() -> None:
    assert slowest_worker([[1.0, 5.0, 2.0], [4.0, 3.0, 2.5]]).tolist() == [4.0, 5.0, 2.5]


@pytest.mark.parametrize("seconds", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_workers_must_have_counted_the_same_iterations(seconds: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="same positive number of iterations"):
        slowest_worker(seconds)


def test_percentiles_interpolate_linearly() -> None:
    timing = Timing.from_seconds([each * 1e-6 for each in range(1, 102)])
    assert timing.min_us == pytest.approx(1)
    assert timing.p50_us == pytest.approx(51)
    assert timing.p99_us == pytest.approx(100)
    assert timing.iterations == 101


def test_no_iterations_are_an_error() -> None:
    with pytest.raises(ValueError, match="no iterations"):
        Timing.from_seconds([])


def test_algorithm_bandwidth_is_one_tensor_over_the_median_in_units_of_1e9() -> None:
    timing = Timing.from_seconds([0.5, 1.0, 3.0])
    assert timing.algbw_gbytes_per_s(4 * 10**9) == pytest.approx(4.0)


@pytest.mark.parametrize(("seconds_each", "iterations"), [(0.1, 10), (100.0, 2), (1e-9, 50), (0.0, 50)])
def test_iterations_fit_the_budget_within_bounds(seconds_each: float, iterations: int) -> None:
    assert iterations_within(1.0, seconds_each, at_least=2, at_most=50) == iterations

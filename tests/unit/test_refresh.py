"""A few new timings change a profile's curves like a link that became slower or faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.machine.catalogue import load_machine
from coarse.machine.partition_table import PartitionTable
from coarse.machine.wiring import link_table
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.linked import profile_from_links
from coarse.profiler.profile import BOTH, PULL, PUSH, ContradictoryFiguresError, PathId, Profile
from coarse.profiler.refresh import largest_change, refresh_profile, rescale_curve
from coarse.profiler.routing import plan_routing

SIZES = [4096 << power for power in range(15)]
CURVE = Curve(points=tuple(CurvePoint(nbytes=size, time_us=10 + size / 1e4) for size in SIZES))


def profile_of_p3() -> Profile:
    table = PartitionTable.even(num_workers=4, num_devices=4)
    links = link_table(load_machine("aws-p3"), table)
    return profile_from_links(links, [table.local_device(worker) for worker in range(4)])


@given(st.floats(0.01, 100), st.sets(st.sampled_from(SIZES), min_size=1))
def test_a_link_that_is_slower_throughout_is_found_from_any_sizes(factor: float, timed: set[int]) -> None:
    slower = rescale_curve(CURVE, {size: CURVE.time_us(size) * factor for size in timed})
    for before, after in zip(CURVE.points, slower.points, strict=True):
        assert after.time_us == pytest.approx(before.time_us * factor)


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_factors_go_over_from_one_size_to_the_other(small: float, large: float) -> None:
    timed = {4096: CURVE.time_us(4096) * small, 1 << 26: CURVE.time_us(1 << 26) * large}
    moved = rescale_curve(CURVE, timed)
    factors = [
        after.time_us / before.time_us for before, after in zip(CURVE.points, moved.points, strict=True)
    ]
    assert factors[0] == pytest.approx(small)
    assert factors[-1] == pytest.approx(large)
    assert factors == pytest.approx(sorted(factors, reverse=large < small))


@given(st.dictionaries(st.sampled_from(SIZES), st.floats(0.01, 100), min_size=1))
def test_a_link_that_recovers_has_its_curve_back(factors: dict[int, float]) -> None:
    slower = rescale_curve(CURVE, {size: CURVE.time_us(size) * factor for size, factor in factors.items()})
    again = rescale_curve(slower, {size: CURVE.time_us(size) for size in factors})
    for before, after in zip(CURVE.points, again.points, strict=True):
        assert after.time_us == pytest.approx(before.time_us)


@pytest.mark.parametrize("times", [{}, {4096: 0.0}, {4096: -1.0}, {4096: float("nan")}, {4096: float("inf")}])
def test_what_is_no_time_is_refused(times: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="time"):
        rescale_curve(CURVE, times)


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(ValueError, match="no such path"):
        refresh_profile(profile_of_p3(), {PathId(kind=BOTH, source=9, target=0): {4096: 1.0}})


def test_times_that_contradict_those_of_other_paths_are_refused_by_type() -> None:
    push, both = (PathId(kind=kind, source=0, target=0) for kind in (PUSH, BOTH))
    with pytest.raises(ContradictoryFiguresError, match="at once contradict"):
        refresh_profile(profile_of_p3(), {both: {1 << 20: 1.0}, push: {1 << 20: 1e6}})


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_link_is_as_much_faster_or_slower_in_one_direction_as_in_both(factor: float) -> None:
    profile = profile_of_p3()
    both = PathId(kind=BOTH, source=0, target=1)
    times = {size: factor * profile.curves[both].time_us(size) for size in (4096, 1 << 21, 1 << 23)}
    changed = refresh_profile(profile, {both: times})
    for path, curve in profile.curves.items():
        is_of_it = (path.source, path.target) == (0, 1) and path.kind in (PUSH, PULL, BOTH)
        for before, after in zip(curve.points, changed.curves[path].points, strict=True):
            assert after.time_us == pytest.approx(before.time_us * (factor if is_of_it else 1))


def test_a_degraded_link_changes_the_routes_of_its_worker_alone() -> None:
    profile = profile_of_p3()
    before = plan_routing(profile)
    degraded = PathId(kind=BOTH, source=1, target=before[1].bw_proxy)
    times = {size: 10 * profile.curves[degraded].time_us(size) for size in (4096, 1 << 21, 1 << 23)}
    assert largest_change(profile, {degraded: times}) == pytest.approx(9.0)
    after = plan_routing(refresh_profile(profile, {degraded: times}))
    assert after[1].bw_proxy != before[1].bw_proxy
    assert after[0] == before[0]


def test_nothing_new_changes_nothing() -> None:
    profile = profile_of_p3()
    assert refresh_profile(profile, {}) == profile
    assert largest_change(profile, {}) == 0.0

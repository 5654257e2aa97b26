"""Timings of real traffic: an active route gives its links' bandwidth, not reduced by its own use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import SIZES, profile_of

from coarse.emulation.pacing import ServedTransfer
from coarse.profiler.profile import BOTH, PathId
from coarse.tuning.traffic import NEAR_FACTOR, TrafficGauge, times_of_traffic

MIB = 1 << 20
UP, DOWN, DUPLEX = 0, 1, 2
PATH = PathId(kind=BOTH, source=0, target=1)


def push(nbytes=MIB, *, up=8.0, duplex=10.0, end_us=1.0, latency_us=20.0):
    """From worker 0 to memory device 1 of two of each, over a link with a limit each way and one on both together."""
    service = [(UP, nbytes / (up * 1e3)), (DUPLEX, nbytes / (duplex * 1e3))]
    return ServedTransfer(0, 3, nbytes, end_us, latency_us, service)


def pull(nbytes=MIB, *, down=8.0, duplex=10.0, end_us=1.0, latency_us=20.0):
    service = [(DOWN, nbytes / (down * 1e3)), (DUPLEX, nbytes / (duplex * 1e3))]
    return ServedTransfer(3, 0, nbytes, end_us, latency_us, service)


def times_of(*served, sizes=(MIB,)):
    return times_of_traffic(served, sizes, num_workers=2, num_devices=2)


def test_a_link_that_both_ways_pass_is_at_them_in_turn():
    assert times_of(push(), pull()) == {PATH: {MIB: pytest.approx(20 + 2 * MIB / 10e3)}}


def test_links_of_one_way_are_at_them_side_by_side():
    times = times_of(push(duplex=100.0, up=4.0), pull(duplex=100.0, latency_us=30.0))
    assert times == {PATH: {MIB: pytest.approx(30 + MIB / 4e3)}}


def test_traffic_tells_of_sizes_about_its_own():
    sizes = (MIB // NEAR_FACTOR // 2, MIB // NEAR_FACTOR, NEAR_FACTOR * MIB, 2 * NEAR_FACTOR * MIB)
    times = times_of(push(), pull(2 * MIB), sizes=sizes)
    assert times == {PATH: {MIB * NEAR_FACTOR: pytest.approx(20 + 2 * NEAR_FACTOR * MIB / 10e3)}}, (
        "a pull of 2 MiB is too large to tell of 256 KiB"
    )


@pytest.mark.parametrize("served", [(), (push(),), (pull(),), (push(), pull(16 * MIB))])
def test_one_way_alone_tells_nothing_of_both(served):
    assert times_of(*served) == {}


def test_the_median_of_the_newest_counts():
    slow = [push(duplex=1.0, end_us=5.0), push(duplex=1.0, end_us=4.0)]
    served = [*slow, push(end_us=3.0), *(pull(duplex=1.0, end_us=end_us) for end_us in (1.0, 2.0, 3.0))]
    assert times_of(*served)[PATH][MIB] == pytest.approx(20 + 2 * MIB / 1e3)


def test_other_pairs_of_ends_are_other_paths():
    other = ServedTransfer(1, 2, MIB, 1.0, 1.0, [(5, 100.0)])
    between_devices = ServedTransfer(2, 3, MIB, 1.0, 1.0, [(6, 100.0)])
    assert set(times_of(push(), pull(), other, between_devices)) == {PATH}


@given(st.floats(1.0, 1e5), st.sampled_from(SIZES))
def test_a_route_whose_traffic_stays_alike_keeps_its_curve(time_us, size):
    """Whatever traffic takes there compared with a probe."""
    profile, gauge = profile_of(), TrafficGauge()
    traffic = {PATH: {size: time_us}}
    assert gauge.read(profile, traffic) == {}, "no look before"
    gauge.look_done(traffic)
    assert gauge.read(profile, traffic) == {PATH: {size: pytest.approx(profile.curves[PATH].time_us(size))}}


@given(st.floats(0.01, 100.0))
def test_traffic_that_takes_longer_tells_by_how_much(factor):
    profile, gauge = profile_of(), TrafficGauge()
    gauge.look_done({PATH: {MIB: 50.0}})
    expected = factor * profile.curves[PATH].time_us(MIB)
    assert gauge.read(profile, {PATH: {MIB: factor * 50.0}}) == {PATH: {MIB: pytest.approx(expected)}}


def test_traffic_after_a_pause_is_compared_with_nothing():
    gauge = TrafficGauge()
    gauge.look_done({PATH: {MIB: 50.0}})
    gauge.look_done({})
    assert gauge.read(profile_of(), {PATH: {MIB: 50.0}}) == {}, "a probe was the last to tell of this link"

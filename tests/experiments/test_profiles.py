"""Profiles of the experiments: several sessions become one, and a host that does other work has none."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from planning import profile_of

from coarse.bench.pace import MOST_DOUBLINGS, PaceError
from coarse.profiler.curve import Curve
from coarse.profiler.linked import profile_from_links
from coarse.profiler.profile import BOTH, PUSH
from experiments import profiles
from experiments.profiles import (
    LARGE_PLAN,
    SESSIONS,
    SMALL_PLAN,
    SMALL_TIME_DILATION,
    TIME_DILATION,
    fastest_of,
    get_sessions,
    join_sizes,
    links_of,
)
from experiments.quiet import ATTEMPTS, BusyMachineError


def sized(profile, sizes):
    curves = {
        path: Curve(points=tuple(point for point in curve.points if point.nbytes in sizes))
        for path, curve in profile.curves.items()
    }
    return profile_of(profile.key, curves=curves)


def test_two_ranges_of_sizes_become_one_profile():
    whole = profile_of()
    small, large = sized(whole, SMALL_PLAN.sizes), sized(whole, LARGE_PLAN.sizes)
    joined = join_sizes(small, large)
    assert [point.nbytes for point in joined.curve(PUSH, 0, 1).points] == [4096 << i for i in range(14)]
    assert joined.time_budget_s == small.time_budget_s + large.time_budget_s


def test_of_several_sessions_the_fastest_counts_and_the_slowest_is_the_spread():
    point = (
        fastest_of([profile_of(local=(alpha_us, 8)) for alpha_us in (6, 5, 7)]).curve(BOTH, 0, 0).points[0]
    )
    assert point.time_us == pytest.approx(5 + 4096 / 8e3)
    assert point.spread_us == pytest.approx(2)
    assert point.num_repeats == 3


class Emulator:
    """Stands in for the sessions: the links' own times, and a lateness in the host's microseconds."""

    def __init__(self, late_us):
        self.late_us, self.ran = late_us, []

    def __call__(self, num_workers, settings, plan, *, limit_s):
        dilation = settings["time_dilation"]
        self.ran.append((min(plan.sizes), dilation))
        profile = profile_from_links(*links_of(settings["machine"]), sizes=plan.sizes)
        return profile, self.late_us / dilation


@pytest.fixture
def emulate(monkeypatch):
    def emulate(late_us):
        emulator = Emulator(late_us)
        monkeypatch.setattr(profiles, "measure", emulator)
        profiles._try_sessions.cache_clear()
        return emulator

    yield emulate
    profiles._try_sessions.cache_clear()


def test_small_sizes_are_measured_in_several_sessions_with_more_dilation(emulate):
    emulator = emulate(late_us=8)
    sessions = get_sessions("aws-p3")
    smallest, large = min(SMALL_PLAN.sizes), min(LARGE_PLAN.sizes)
    assert emulator.ran == [(large, TIME_DILATION), *[(smallest, SMALL_TIME_DILATION)] * SESSIONS]
    assert len(sessions.profiles) == SESSIONS
    pacing = sessions.measured[0].pacing
    assert pacing.lateness_us == 8 / SMALL_TIME_DILATION
    assert pacing.error == pytest.approx(pacing.lateness_us / (10 + 4096 / 4.68e3), rel=0.01)
    of_large_us = 20 + (512 << 10) / 8.32e3  # by a remote path
    assert sessions.pacing.error == pytest.approx(8 / TIME_DILATION / of_large_us, rel=0.01), "the largest"


def test_sessions_that_do_not_keep_pace_are_repeated_and_then_refused(emulate):
    emulator = emulate(late_us=150)
    assert {each.pacing.time_dilation for each in get_sessions("aws-p3").measured} == {400.0}
    assert (min(SMALL_PLAN.sizes), 200.0) in emulator.ran
    refused = emulate(late_us=4000)
    for _ in range(2):
        with pytest.raises(PaceError, match="profile of aws-p3, "):
            get_sessions("aws-p3")
    assert len(refused.ran) == 1 + MOST_DOUBLINGS, "each machine is measured once"


def test_other_work_that_begins_during_a_profile_of_the_host_is_told(monkeypatch):
    made = []
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()\nwhile True: pass"], stdin=subprocess.PIPE, text=True
    ) as other:

        def measure_beside_other_work(*_):
            if not made:
                other.stdin.write("\n")
                other.stdin.flush()
            made.append(time.sleep(0.3))
            return profile_of(), 0.0

        monkeypatch.setattr(profiles, "measure", measure_beside_other_work)
        monkeypatch.setattr(profiles, "MOST_BUSY", 0.01)
        profiles._try_sessions.cache_clear()
        try:
            with pytest.raises(BusyMachineError, match="profile of this machine: other work takes"):
                get_sessions("host")
        finally:
            other.kill()
    assert len(made) == ATTEMPTS

"""Switch-over sizes: measurements agree with the prediction, or the table reports the disagreement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planning import curve_of, key_of, path, profile_of

from coarse.bench.pace import Paced, Pacing
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.direct_allreduce import ALL_GATHER, ALL_TO_ALL, RING
from coarse.profiler.routing import plan_routing
from coarse.profiler.switchover import all_gather, all_to_all, ring
from experiments.expectation import WITHIN
from experiments.profiles import Sessions, fastest_of
from experiments.repeatability import has_moved
from experiments.switch_over.run import SIZES, Timings, compare_proxies, compare_ways

LINK = path(20, 10)
MODEL = {ALL_GATHER: all_gather(LINK, 4), ALL_TO_ALL: all_to_all(LINK, 4), RING: ring(LINK, 4)}


def timings(factors):
    """The workers' measurements if each algorithm took `factors` times as long as the model predicts."""
    curves = {
        way: Curve(points=tuple(CurvePoint(nbytes=n, time_us=model.time_us(n) * factors[way]) for n in SIZES))
        for way, model in MODEL.items()
    }
    return Timings(machine="test", num_workers=4, curves=curves)


def test_measured_as_predicted():
    findings, data = compare_ways(timings(dict.fromkeys(MODEL, 1.0)), MODEL)
    assert [finding.verdict for finding in findings] == [WITHIN] * 3
    assert findings[0].found == "from 130 KiB on"  # alpha beta N / ((N-1)(N-2)) = 133 kB
    assert findings[2].found == "not faster up to 2 MiB"
    assert {values["kind"] for values in data} == {"emulated"}


def check_of_proxies(*sessions):
    """The check of a run whose sessions had these delays of local and remote transfers, and reported the third."""
    measured = tuple(
        Paced(
            value=profile_of(key_of(machine="aws-p3"), local=(10 + near, 4.5), remote=(20 + far, 8)),
            pacing=Pacing(lateness_us=late, error=late / 10, time_dilation=200.0),
        )
        for near, far, late in sessions
    )
    profile = fastest_of([each.value for each in measured])
    finding, _ = compare_proxies(Sessions(measured=measured), profile, plan_routing(profile))
    return finding.checks[0]


def test_the_spread_of_a_threshold_contains_that_of_every_session():
    measured = check_of_proxies((0, 0, 0), (1, 0, 0), (0, 0.5, 0)).measured
    assert measured.value == pytest.approx(100.45, abs=0.1)  # 10 us / (1 / 4.5 - 1 / 8)
    assert measured.low == pytest.approx(0.9 * 100.45, abs=0.1)
    assert measured.high == pytest.approx(1.05 * 100.45, abs=0.1)


def test_the_spread_of_a_threshold_contains_the_delays_of_arrivals():
    measured = check_of_proxies((0, 0, 0.25)).measured
    assert measured.low == pytest.approx(0.95 * 100.45, abs=0.1)
    assert measured.high == pytest.approx(1.05 * 100.45, abs=0.1)


def test_a_threshold_does_not_move_between_runs_whose_sessions_differ():
    assert not has_moved(
        check_of_proxies((0.7, 0.0, 0.4), (0.1, 0.1, 0.1), (0.3, 0.0, 0.2)),
        check_of_proxies((0.0, 0.0, 0.1), (0.0, 0.2, 0.1), (0.1, 0.4, 0.3)),
    )


def test_every_session_of_the_direct_all_reduce_counts():
    by_model = np.array([[MODEL[way].time_us(n) for n in SIZES] for way in (ALL_GATHER, ALL_TO_ALL, RING)])
    slow = by_model * np.array([1.0, 1.1, 1.0])[:, None]
    timed = Timings.from_repeats("test", 4, np.stack([by_model, by_model, slow]))
    (check, *_) = compare_ways(timed, MODEL)[0][0].checks
    assert check.measured.value == check.measured.low == pytest.approx(130, abs=1)
    assert check.measured.high > 1.1 * check.measured.value


def test_the_spread_is_that_of_the_repeats():
    repeats = [
        timings({**dict.fromkeys(MODEL, 1.0), ALL_TO_ALL: factor}).curves for factor in (0.9, 1.0, 1.1)
    ]
    spread = replace(timings(dict.fromkeys(MODEL, 1.0)), repeats=tuple(repeats))
    findings, _ = compare_ways(spread, MODEL)
    (check,) = findings[0].checks
    assert check.measured.low < 0.9 * check.measured.value
    assert check.measured.high > 1.1 * check.measured.value


@pytest.mark.parametrize(("slower", "deviation"), [(ALL_GATHER, "from lower"), (ALL_TO_ALL, "from higher")])
def test_a_way_that_is_slower_than_predicted_is_told(slower, deviation):
    findings, _ = compare_ways(timings({**dict.fromkeys(MODEL, 1.0), slower: 1.5}), MODEL)
    assert findings[0].deviations == [deviation]


def test_a_way_that_is_faster_than_predicted_is_told():
    findings, _ = compare_ways(timings({**dict.fromkeys(MODEL, 1.0), RING: 0.1}), MODEL)
    assert findings[2].expected == "not faster up to 2 MiB (predicted)"
    assert findings[2].deviations == ["other"]


def test_two_workers_have_one_way_less_to_compare():
    pair = {ALL_GATHER: all_gather(LINK, 2), ALL_TO_ALL: all_to_all(LINK, 2), RING: ring(LINK, 2)}
    measured = Timings(
        machine="test", num_workers=2, curves={way: curve_of(model) for way, model in pair.items()}
    )
    findings, _ = compare_ways(measured, pair)
    assert len(findings) == 2

"""Switch-over sizes: measurements agree with the prediction, or the table reports the disagreement."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import curve_of, path

from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.direct_allreduce import ALL_GATHER, ALL_TO_ALL, RING
from coarse.profiler.switchover import all_gather, all_to_all, ring
from experiments.expectation import WITHIN
from experiments.switch_over.run import SIZES, Timings, compare_ways

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

"""Elastic: goodput and lost steps follow from the steps that workers log; COARSE loses none when one is killed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from experiments.common import Options, run_experiment
from experiments.elastic.goodput import (
    Absence,
    JobLog,
    Step,
    capacity,
    goodput,
    goodputs,
    longest_standstill,
    lost_steps,
    throughput,
    useful_steps,
    world_sizes,
)
from experiments.elastic.jobs import Plan
from experiments.elastic.run import EXPERIMENT, Run, parse_plan, run_plan

STEP_S, BATCH = 0.5, 4
RATE = BATCH / STEP_S


def steps(first, last, *, at_s, counted=True):
    """Steps of half a second, from a number to before another one."""
    begins = [at_s + STEP_S * (number - first) for number in range(first, last)]
    return [
        Step(number, begin_s, begin_s + STEP_S, counted)
        for number, begin_s in zip(range(first, last), begins, strict=True)
    ]


def log_of(*places, absences=(), ended_s=10.0):
    return JobLog(steps=places, absences=absences, batch=BATCH, began_s=0.0, ended_s=ended_s, accuracy=0.97)


def without_kills():
    return log_of(steps(0, 20, at_s=-0.25), steps(0, 20, at_s=-0.25))


def replaced():
    """Worker 1 is killed after 4 s in its ninth step; the next one has its model after 6 s and trains from 7 s on."""
    after = steps(14, 20, at_s=6.75)
    absence = Absence(place=1, killed_s=4.0, ready_s=6.0)
    return log_of(steps(0, 20, at_s=-0.25), steps(0, 8, at_s=-0.25) + after, absences=[absence])


def restarted():
    """Worker 1 is killed after 4 s; 2 s later both go on from the checkpoint of step 5."""
    both = steps(0, 8, at_s=-0.25) + steps(5, 13, at_s=6.0 - 0.25)
    absence = Absence(place=1, killed_s=4.0, ready_s=5.5)
    return log_of(both, both, absences=[absence])


def test_without_kills_goodput_is_whole():
    log = without_kills()
    assert goodput(log, {2: RATE}) == pytest.approx(1)
    assert lost_steps(log) == 0
    assert longest_standstill(log) == pytest.approx(STEP_S)
    assert throughput(log, 1.0) == [pytest.approx(2 * RATE)] * 10
    assert world_sizes(log, 1.0) == [2] * 10


def test_the_time_without_a_worker_is_nobodys_fault_but_what_it_waits_for_is():
    log = replaced()
    rates = {2: RATE, 1: RATE}
    assert capacity(log, rates, 0.0, 10.0) == pytest.approx((2 * 8 + 2) * RATE)
    assert goodput(log, rates) == pytest.approx((20 + 14) / (2 * 18))  # of 36 steps
    assert lost_steps(log) == 0
    assert world_sizes(log, 1.0) == [2, 2, 2, 2, 1, 1, 1, 2, 2, 2]


def test_the_range_of_goodput_is_that_of_intervals():
    log, rates = replaced(), {2: RATE, 1: RATE}
    assert goodputs(log, rates, 5.0) == [pytest.approx(1), pytest.approx(16 / 18)]
    found = Run(log=log, rates=rates).goodput_over(5.0)
    assert (found.low, found.value, found.high) == tuple(map(pytest.approx, (1600 / 18, 3400 / 36, 100)))


def test_survivors_that_could_be_faster_are_measured_by_that():
    log = replaced()
    assert capacity(log, {2: RATE, 1: 2 * RATE}, 0.0, 10.0) == pytest.approx((2 * 8 + 2 * 2) * RATE)
    assert goodput(log, {2: RATE, 1: 2 * RATE}) < goodput(log, {2: RATE, 1: RATE})


def test_fewer_workers_than_measured_have_the_rate_of_the_fewest():
    absences = [Absence(place=place, killed_s=2.0, ready_s=4.0) for place in (1, 2)]
    log = log_of(*[steps(0, 20, at_s=-0.25)] * 3, absences=absences)
    assert capacity(log, {3: 1.0, 2: 1.25}, 0.0, 10.0) == pytest.approx(8 * 3 + 2 * 1.25)


def test_rolled_back_steps_are_lost_and_survivors_that_are_restarted_cost():
    log = restarted()
    assert [step.number for step in useful_steps(log.steps[0])] == list(range(13))
    assert [step.began_s for step in useful_steps(log.steps[0])][5] > 5  # of the second time
    assert lost_steps(log) == 3
    assert goodput(log, {2: RATE, 1: RATE}) == pytest.approx(2 * 13 / (2 * (2 * 8.5 + 1.5)))
    assert longest_standstill(log) == pytest.approx(6.25 - 2.25)
    assert world_sizes(log, 1.0)[3:6] == [0, 0, 0]


def test_a_discarded_step_is_lost_once_for_all_workers():
    discarded = steps(4, 5, at_s=1.75, counted=False)
    both = steps(0, 4, at_s=-0.25) + discarded + steps(4, 19, at_s=2.25)
    log = log_of(both, both)
    assert lost_steps(log) == 1
    assert goodput(log, {2: RATE}) == pytest.approx(19 / 20)


def test_a_step_to_which_one_worker_contributes_nothing_is_not_lost():
    healing = steps(10, 11, at_s=4.75, counted=False) + steps(11, 20, at_s=5.25)
    log = log_of(steps(0, 20, at_s=-0.25), healing)
    assert lost_steps(log) == 0
    assert goodput(log, {2: RATE}) == pytest.approx(29 / 40)


def test_kills_are_the_same_each_time_one_in_each_interval_and_apart():
    plan = Plan(seconds=300, kill_every_s=15)
    moments = [kill.after_s for kill in plan.kills()]
    assert plan.kills() == plan.kills()
    assert [int(moment / 15) for moment in moments] == list(range(20))
    assert min(later - earlier for earlier, later in pairwise(moments)) >= 7.5
    assert {kill.places[0] for kill in plan.kills()} == {0, 1, 2}
    assert Plan(seed=1).kills() != plan.kills()


def test_a_plan_without_survivors_is_refused():
    with pytest.raises(ValueError, match="without survivors"):
        Plan(workers=1)


def test_figures_of_another_plan_do_not_get_into_the_tables(capsys):
    assert parse_plan(["--results", "there"]) == (Plan(), ["--results", "there"])
    plan, rest = parse_plan(["--seconds", "600", "--systems", "coarse", "--results", "there"])
    assert (plan.seconds, plan.systems, rest) == (600, ("coarse",), ["--results", "there"])
    plan, _ = parse_plan(["--preload", "torch", "--results", "there"])
    assert (plan.preload, Plan().preload) == ("torch", "")
    with pytest.raises(SystemExit):
        parse_plan(["--seconds", "600"])
    assert "--results" in capsys.readouterr().err


@pytest.mark.parametrize(
    "systems",
    [("coarse",), pytest.param(("coarse", "torchft", "torchrun"), marks=pytest.mark.slow)],
    ids=lambda systems: "-".join(systems),
)
def test_coarse_loses_no_step(tmp_path, systems):
    pytest.importorskip("torch")
    plan = Plan(systems=systems, calm_s=2, seconds=10, kill_every_s=8, seed=1)  # with a kill after 2.5 s
    experiment = replace(EXPERIMENT, run=lambda options: run_plan(plan, options))
    outcome = run_experiment(experiment, Options(is_quick=True, results=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "churn.png", "churn.svg"}
    data = json.loads((tmp_path / "results.json").read_text())["data"][0]
    assert data["system"] == "coarse"
    assert data["lost_steps"] == 0
    (kill,) = data["kills"]
    assert kill["at_s"] > 2
    assert 0 < kill["absent_s"] < len(data["world_sizes"]), "another worker has taken its place"
    assert max(data["world_sizes"][:2]) == 3
    assert 2 in data["world_sizes"], "the others train meanwhile"
    assert "steps lost 0" in outcome.findings[0].found

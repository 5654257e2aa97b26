"""Goodput: closed forms, orders between systems, and seeds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from small_jobs import small_setup

from coarse.simulator.faults.goodput import Recovery, goodput, recoveries
from coarse.simulator.training_step import simulate_step

STEP_S = 2.0
HOURS = 40.0


@pytest.fixture(scope="module")
def result():
    """8 workers and no memory device; a step of 2 s."""
    return replace(simulate_step(small_setup(), "allreduce-ring"), step_s=STEP_S)


def rate(num):
    return num / (HOURS * 3600)


def test_from_a_checkpoint_it_is_dalys(result):
    """Without a failure for the pause and k intervals with their checkpoints, k intervals count."""
    recovery = Recovery(what="", worker_pause_s=300.0, is_worker_state_lost=True, checkpoint_s=30.0)
    found = goodput(result, recovery, HOURS)
    failures, interval_s = rate(8), found.checkpoint_every_s
    assert interval_s == STEP_S * math.floor(math.sqrt(2 * 30 / failures) / STEP_S)
    expected = failures * interval_s * math.exp(-300 * failures) / math.expm1(failures * (interval_s + 30))
    assert found.share == pytest.approx(expected, rel=0.01)
    assert found.failures_per_day == pytest.approx(8 * 24 / HOURS)
    assert found.steps_per_hour == pytest.approx(found.share * 3600 / STEP_S)


def test_from_memory_only_the_step_in_progress_is_lost(result):
    found = goodput(result, Recovery(what="", worker_pause_s=300.0), HOURS)
    expected = rate(8) * STEP_S * math.exp(-300 * rate(8)) / math.expm1(rate(8) * STEP_S)
    assert found.share == pytest.approx(expected, rel=0.01)
    assert math.isinf(found.checkpoint_every_s)


def test_others_that_go_on_lose_the_share_of_the_one_that_is_absent(result):
    alone = goodput(result, Recovery(what="", worker_pause_s=1.0), HOURS).share
    found = goodput(result, Recovery(what="", worker_pause_s=1.0, absence_s=7200.0), HOURS).share
    assert found == pytest.approx(alone * (1 - 7200 / (HOURS * 3600)))


def test_each_part_lost_costs_its_own(result):
    """Workers lose nothing but the pause, memory devices a checkpoint: between both alone."""
    memory = replace(simulate_step(small_setup(), "offload"), step_s=STEP_S)
    both = Recovery(
        what="",
        worker_pause_s=100.0,
        device_pause_s=100.0,
        is_device_state_lost=True,
        checkpoint_s=100.0,
    )
    all_lost = goodput(memory, replace(both, is_worker_state_lost=True), HOURS).share
    none_lost = goodput(memory, replace(both, is_device_state_lost=False), HOURS).share
    assert all_lost < goodput(memory, both, HOURS).share < none_lost
    assert goodput(memory, both, HOURS).failures_per_day == pytest.approx(16 * 24 / HOURS)


def test_a_checkpoint_that_was_being_written_does_not_count(result):
    """Checkpoints longer than any gap between failures: nothing ever counts."""
    recovery = Recovery(what="", worker_pause_s=0.0, is_worker_state_lost=True, checkpoint_s=1e9)
    assert goodput(result, recovery, HOURS).share == 0


def test_a_pause_longer_than_the_time_between_failures_leaves_nothing(result):
    first_gap_alone = 1 / 1000
    assert goodput(result, Recovery(what="", worker_pause_s=1e7), HOURS).share < first_gap_alone


def test_goodput_falls_with_failures_and_is_whole_without(result):
    recovery = recoveries(result)["checkpoint"]
    shares = [goodput(result, recovery, hours).share for hours in (1e7, 1e5, 1e3, 10.0, 0.1)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99
    assert shares[-1] < 0.8


def test_equal_seeds_give_equal_results(result):
    recovery = recoveries(result)["checkpoint"]
    assert goodput(result, recovery, 10.0, seed=1) == goodput(result, recovery, 10.0, seed=1)
    assert goodput(result, recovery, 10.0, seed=1) != goodput(result, recovery, 10.0, seed=2)


def test_recoveries_fit_their_scheme():
    def names(scheme):
        return list(recoveries(simulate_step(small_setup(), scheme)))

    assert names("coarse") == ["memory", "memory, replicas"]
    assert names("allreduce") == ["checkpoint", "discard step"]
    assert names("fsdp") == names("parameter-server") == ["checkpoint"]


@pytest.mark.parametrize("hours", [0.0, -1.0, math.inf, math.nan])
def test_impossible_times_are_refused(hours, result):
    with pytest.raises(ValueError, match="hours between failures"):
        goodput(result, Recovery(what="", worker_pause_s=1.0), hours)
    with pytest.raises(ValueError, match="times of a recovery"):
        Recovery(what="", worker_pause_s=-1.0)

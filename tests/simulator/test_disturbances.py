"""Stragglers, slow links and jitter: bounds and closed forms of their cost for each scheme."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_jobs import small_setup

from coarse.simulator.faults.disturbances import Disturbances, Jitter
from coarse.simulator.faults.jittered import simulate_jittered
from coarse.simulator.schemes.catalogue import SCHEMES
from coarse.simulator.training_step import simulate_step

EACH_SCHEME = pytest.mark.parametrize("scheme", SCHEMES)


def step(scheme, slow_workers=(), slow_links=()):
    disturbances = Disturbances(slow_workers=dict(slow_workers), slow_links=dict(slow_links))
    return simulate_step(small_setup(disturbances=disturbances), scheme)


@EACH_SCHEME
def test_a_step_waits_for_its_straggler(scheme):
    """All workers slow take longest, the straggler's own computation is the least, and nobody waits beyond it."""
    undisturbed, one = step(scheme), step(scheme, {5: 3.0})
    every = step(scheme, dict.fromkeys(range(8), 3.0))
    assert one.compute_s == undisturbed.compute_s
    assert 3 * undisturbed.compute_s <= one.step_s <= every.step_s * (1 + 1e-9)
    assert one.step_s <= undisturbed.step_s + 2 * undisturbed.compute_s + 1e-12


@EACH_SCHEME
def test_a_factor_of_one_changes_nothing(scheme):
    assert step(scheme, {2: 1.0}).step_s == pytest.approx(step(scheme).step_s, rel=1e-9)


def test_others_push_before_the_straggler():
    """Over shared uplinks the straggler then pushes alone, and faster than if all were slow."""

    def wait_s(slow_workers):
        disturbances = Disturbances(slow_workers=slow_workers)
        setup = small_setup("fat-tree", oversubscription=8, disturbances=disturbances)
        result = simulate_step(setup, "parameter-server")
        return result.step_s - 20 * result.compute_s

    assert 0 < wait_s({0: 20.0}) < 0.8 * wait_s(dict.fromkeys(range(8), 20.0))


def test_a_ring_slows_down_with_its_slowest_link():
    """The ring has no time between its buckets, so its time beyond latencies grows with the factor."""
    times = [step("allreduce-ring", slow_links={"worker 3 up": factor}).step_s for factor in (10, 20, 30)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=0.02)
    assert times[1] > 1.5 * times[0]


@EACH_SCHEME
def test_a_slow_lane_of_a_worker_costs_every_scheme(scheme):
    assert step(scheme, slow_links={"worker 3 up": 50}).step_s > 1.5 * step(scheme).step_s


def test_slow_links_and_workers_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match=r"no link 'worker 3'; of \d+ links, the most similar: worker 3 "):
        step("offload", slow_links={"worker 3": 2})
    with pytest.raises(ValueError, match="there is no worker 8 among 8"):
        step("offload", {8: 2})


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_factors_are_refused(factor):
    with pytest.raises(ValueError, match="times slower"):
        Disturbances(slow_workers={0: factor})
    with pytest.raises(ValueError, match="times slower"):
        Disturbances(slow_links={"worker 0 up": factor})


def test_jitter_has_its_mean_and_variation():
    jitter = Jitter(variation=0.3, num_steps=200, seed=1)
    factors = np.array([list(each.slow_workers.values()) for each in jitter.steps(50)])
    assert factors.shape == (200, 50)
    assert factors.mean() == pytest.approx(1, abs=0.01)
    assert factors.std() == pytest.approx(0.3, rel=0.05)


def test_jitter_comes_on_top_of_stragglers_and_keeps_slow_links():
    base = Disturbances(slow_workers={1: 4.0}, slow_links={"l": 2.0})
    (alone,) = Jitter(variation=0.1, num_steps=1).steps(3)
    (both,) = Jitter(variation=0.1, num_steps=1).steps(3, base)
    assert both.slow_links == base.slow_links
    assert both.slow_workers == pytest.approx(
        {worker: factor * (4 if worker == 1 else 1) for worker, factor in alone.slow_workers.items()}
    )


def test_equal_seeds_give_equal_steps_and_others_do_not():
    def times(seed):
        return simulate_jittered(
            small_setup(), "allreduce", Jitter(variation=0.2, num_steps=4, seed=seed)
        ).steps_s

    assert times(3) == times(3)
    assert len({*times(3), *times(4)}) == 8


def test_without_variation_every_step_is_undisturbed():
    setup = small_setup()
    times = simulate_jittered(setup, "coarse", Jitter(variation=0, num_steps=2))
    assert times.steps_s == pytest.approx([simulate_step(setup, "coarse").step_s] * 2)


def test_a_step_with_jitter_takes_as_long_as_its_slowest_worker():
    """Computation alone, as links are fast: the mean of the largest of 8 log-normal factors."""
    setup = small_setup()
    long = replace(setup, trace=replace(setup.trace, forward_s=1.0, backward_s=2.0))
    times = simulate_jittered(long, "allreduce", Jitter(variation=0.1, num_steps=30))
    largest = [max(each.slow_workers.values()) for each in Jitter(variation=0.1, num_steps=30).steps(8)]
    assert times.mean_s == pytest.approx(3 * np.mean(largest), rel=1e-3)

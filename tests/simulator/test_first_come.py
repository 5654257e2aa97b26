"""Links that serve first come, first served, on cases with results in closed form, and their errors."""

from __future__ import annotations

import random

import pytest

from coarse.simulator.events import first_come
from coarse.simulator.events.engine import simulate
from coarse.simulator.events.first_come import simulate_first_come
from coarse.simulator.events.tasks import Task

ONE = (("link", 1.0),)
TRUE_SERVE = first_come._serve


def finish(tasks, **capacities):
    return {name: times.finished_s for name, times in simulate_first_come(tasks, capacities).times.items()}


def test_a_link_serves_one_transfer_after_the_other():
    tasks = [
        Task(name="a", nbytes=10, usage=ONE, overhead_s=0.5, latency_s=0.25),
        Task(name="b", order=1, nbytes=30, usage=ONE),
    ]
    assert finish(tasks, link=10.0) == {"a": 1.75, "b": 4.5}


def test_a_transfer_that_waits_in_one_bucket_keeps_its_time_in_the_others():
    """Max-min fair links would let the last one finish at 2."""
    tasks = [
        Task(name="first", nbytes=4, usage=(("narrow", 1.0),)),
        Task(name="both", order=1, nbytes=4, usage=(("narrow", 1.0), ("wide", 1.0))),
        Task(name="last", order=2, nbytes=2, usage=(("wide", 1.0),)),
    ]
    assert finish(tasks, narrow=1.0, wide=1.0) == {"first": 4.0, "both": 8.0, "last": 6.0}


def test_queues_have_no_effect_and_order_decides_at_one_moment():
    tasks = [Task(name=str(n), queue="copy", order=-n, overhead_s=1, nbytes=10, usage=ONE) for n in range(3)]
    assert finish(tasks, link=10.0) == {"2": 2.0, "1": 3.0, "0": 4.0}


def random_tasks(chance):
    buckets = {f"b{number}": chance.uniform(1, 9) for number in range(4)}
    tasks = []
    for number in range(60):
        used = chance.sample(sorted(buckets), chance.randint(1, 3))
        tasks.append(
            Task(
                name=f"t{number}",
                after=tuple(chance.sample([each.name for each in tasks], min(len(tasks), 2))),
                ready_s=chance.uniform(0, 20),
                order=number,
                nbytes=chance.uniform(1, 20),
                usage=tuple((bucket, chance.uniform(0.5, 2)) for bucket in used),
                latency_s=chance.uniform(0, 1),
            )
        )
    return tasks, buckets


def serves_twice_the_bytes(task, now_s, capacities, free_s):
    """Planted: a bucket is twice as fast as it says."""
    return TRUE_SERVE(task, now_s, {name: 2 * rate for name, rate in capacities.items()}, free_s)


def forgets_earlier_transfers(task, now_s, capacities, free_s):
    """Planted: a bucket serves every transfer at once."""
    return TRUE_SERVE(task, now_s, capacities, dict.fromkeys(free_s, 0.0))


def check_capacity(seed):
    """Until a task's last byte, a bucket carries no more than its rate allows, and moments follow each other."""
    tasks, buckets = random_tasks(random.Random(seed))
    outcome = simulate_first_come(tasks, buckets)
    assert outcome.times == simulate_first_come(reversed(tasks), buckets).times
    assert outcome.bucket_bytes == simulate(tasks, buckets).bucket_bytes
    for task in tasks:
        times = outcome.times[task.name]
        assert times.ready_s >= max(
            (outcome.times[name].finished_s for name in task.after), default=task.ready_s
        )
        assert times.finished_s == pytest.approx(times.last_byte_s + task.latency_s)
        for bucket, rate in buckets.items():
            done = [
                other.nbytes * weight
                for other in tasks
                for name, weight in other.usage
                if name == bucket and outcome.times[other.name].last_byte_s <= times.last_byte_s
            ]
            assert sum(done) <= rate * times.last_byte_s * (1 + 1e-9)


def check_capacities():
    for seed in range(5):
        check_capacity(seed)


def test_no_bucket_exceeds_its_rate_and_the_sequence_of_the_input_has_no_effect():
    check_capacities()


@pytest.mark.parametrize("planted", [serves_twice_the_bytes, forgets_earlier_transfers])
def test_planted_errors_are_found(monkeypatch, planted):
    monkeypatch.setattr(first_come, "_serve", planted)
    with pytest.raises(AssertionError):
        check_capacities()


def test_tasks_that_wait_for_each_other_and_unknown_buckets_are_named():
    with pytest.raises(ValueError, match="2 tasks wait for each other in a circle, a among them"):
        simulate_first_come([Task(name="a", after=("b",)), Task(name="b", after=("a",))], {})
    with pytest.raises(ValueError, match="crosses bucket link, which does not exist"):
        simulate_first_come([Task(name="a", nbytes=1, usage=ONE)], {})

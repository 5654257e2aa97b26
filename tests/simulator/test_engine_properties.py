"""The engine: its properties hold for any tasks, and each of its planted errors breaks one of them."""

from __future__ import annotations

import random
from collections import defaultdict

import engine_checks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coarse.simulator.events import engine
from coarse.simulator.events.engine import simulate
from coarse.simulator.events.tasks import Task

BUCKETS = ("a", "b", "c", "d")
QUEUES = ("", "", "q", "r")
CHANNELS = {"r": 3}
MOMENTS = (0.0, 0.0, 1.0, 2.5)

rates = st.floats(min_value=0.1, max_value=1e3)
weights = st.sampled_from((1.0, 1.0, 0.5, 3.0, 0.0))


@st.composite
def task_graphs(draw):
    """Tasks of which each may wait for earlier ones, and capacities for all buckets."""
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, 12))):
        crossed = draw(st.lists(st.sampled_from(BUCKETS), unique=True, min_size=1))
        usage = tuple((bucket, draw(weights)) for bucket in crossed)
        has_bytes = any(weight for _, weight in usage)
        earlier = [task.name for task in tasks]
        tasks.append(
            Task(
                name=f"t{number}",
                after=tuple(draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3)))
                if earlier
                else (),
                ready_s=draw(st.sampled_from(MOMENTS)),
                queue=draw(st.sampled_from(QUEUES)),
                order=draw(st.integers(0, 2)),
                overhead_s=draw(st.sampled_from((0.0, 0.25))),
                nbytes=draw(st.sampled_from((0.0, 1.0, 7.0, 1000.0))) if has_bytes else 0.0,
                usage=usage,
                latency_s=draw(st.sampled_from((0.0, 0.5))),
            )
        )
    return tasks, {bucket: draw(rates) for bucket in BUCKETS}


@settings(max_examples=200, deadline=None)
@given(task_graphs())
def test_all_properties_hold(graph):
    engine_checks.check_simulation(*graph, CHANNELS)


@settings(max_examples=100, deadline=None)
@given(task_graphs(), st.randoms(use_true_random=False))
def test_the_order_of_insertion_changes_no_bit(graph, chance):
    tasks, capacities = graph
    shuffled, buckets = list(tasks), list(capacities.items())
    chance.shuffle(shuffled)
    chance.shuffle(buckets)
    one = simulate(tasks, capacities, channels=CHANNELS)
    other = simulate(shuffled, dict(buckets), channels=CHANNELS)
    assert one.times == other.times
    assert one.bucket_bytes == other.bucket_bytes


@settings(max_examples=50, deadline=None)
@given(task_graphs(), st.integers(2, 4))
def test_equal_flows_may_be_folded_into_one_of_their_sum(graph, copies):
    """A flow whose usage counts `copies` flows takes as long as that many flows."""
    tasks, capacities = graph
    tasks = [
        Task(name=t.name, ready_s=t.ready_s, nbytes=t.nbytes, usage=t.usage, latency_s=t.latency_s)
        for t in tasks
    ]
    many = [
        Task(
            name=f"{t.name}.{copy}",
            ready_s=t.ready_s,
            nbytes=t.nbytes,
            usage=t.usage,
            latency_s=t.latency_s,
        )
        for t in tasks
        for copy in range(copies)
    ]
    folded = [
        Task(
            name=t.name,
            ready_s=t.ready_s,
            nbytes=t.nbytes,
            usage=tuple((bucket, copies * weight) for bucket, weight in t.usage),
            latency_s=t.latency_s,
        )
        for t in tasks
    ]
    one, other = simulate(many, capacities), simulate(folded, capacities)
    for task in tasks:
        assert one.times[f"{task.name}.0"].finished_s == pytest.approx(
            other.times[task.name].finished_s, rel=1e-9
        )
    assert one.bucket_bytes == pytest.approx(other.bucket_bytes)


# ---- planted errors: each must break a property ----


def shares_unfairly(monkeypatch):
    fair = engine.fair_rates

    def unfair(shared, counts):
        rates = fair(shared, counts)
        active = np.flatnonzero(counts)
        if len(active) > 1:
            rates[active[0]] /= 2
        return rates

    monkeypatch.setattr(engine, "fair_rates", unfair)


def forgets_a_bucket(monkeypatch):
    fair = engine.fair_rates

    def without_one(shared, counts):
        capacities = shared.capacities.copy()
        capacities[0] *= 1e6
        wide = type(shared)(
            capacities=capacities, flow_class=shared.flow_class, bucket=shared.bucket, weight=shared.weight
        )
        return fair(wide, counts)

    monkeypatch.setattr(engine, "fair_rates", without_one)


def counts_a_latency_twice(monkeypatch):
    monkeypatch.setattr(engine, "arrival_s", lambda last_byte_s, task: last_byte_s + 2 * task.latency_s)


def loses_bytes_at_a_rate_change(monkeypatch):
    update = engine._Flows._update_rates

    def losing(self):
        if self._are_rates_due:
            self._served += 0.1 * (self._counts > 0) * (self._served > 0)
        update(self)

    monkeypatch.setattr(engine._Flows, "_update_rates", losing)


def serves_twice_the_bytes(monkeypatch):
    def twice(served, rates, seconds):
        served += 2 * rates * seconds

    monkeypatch.setattr(engine, "serve", twice)


def handles_an_event_out_of_order(monkeypatch):
    pop = engine.heappop

    def last_first(heap):
        if len(heap) > 1 and heap[-1][0] > heap[0][0]:
            return heap.pop()
        return pop(heap)

    monkeypatch.setattr(engine, "heappop", last_first)


def serves_one_more_of_a_queue_at_once(monkeypatch):
    start = engine._Queue.__init__
    monkeypatch.setattr(engine._Queue, "__init__", lambda self, num: start(self, num + 1))


def serves_the_last_of_a_queue_first(monkeypatch):
    add = engine._Queue.add
    monkeypatch.setattr(engine._Queue, "add", lambda self, ready_s, number: add(self, ready_s, -number))
    take = engine._Queue.take

    def taking(self):
        number = take(self)
        return None if number is None else -number

    monkeypatch.setattr(engine._Queue, "take", taking)


def keeps_rates_of_another_mix(monkeypatch):
    update = engine._Flows._update_rates

    def stale(self):
        is_known = self._rates.any() and (self._rates > 0).sum() >= (self._counts > 0).sum()
        if self._are_rates_due and is_known and not (self._counts[self._rates == 0] > 0).any():
            self._are_rates_due = False
        update(self)

    monkeypatch.setattr(engine._Flows, "_update_rates", stale)


def starts_before_what_it_waits_for(monkeypatch):
    finish = engine._Run._flow_ended

    def early(self, number):
        for follower in self._followers[number][:1]:
            if self._num_awaited[follower] == 1:
                self._num_awaited[follower] = 0
                self._at(self._now_s, engine._READY, follower)
                self._followers[number] = self._followers[number][1:]
        finish(self, number)

    monkeypatch.setattr(engine._Run, "_flow_ended", early)


PLANTED = (
    shares_unfairly,
    forgets_a_bucket,
    counts_a_latency_twice,
    loses_bytes_at_a_rate_change,
    serves_twice_the_bytes,
    handles_an_event_out_of_order,
    serves_one_more_of_a_queue_at_once,
    serves_the_last_of_a_queue_first,
    keeps_rates_of_another_mix,
    starts_before_what_it_waits_for,
)


def random_graph(chance):
    """Like task_graphs(), from a seed, so that a planted error meets the same graphs in every run."""
    tasks = []
    for number in range(10):
        crossed = chance.sample(BUCKETS, chance.randint(1, 3))
        earlier = [task.name for task in tasks]
        tasks.append(
            Task(
                name=f"t{number}",
                after=tuple(chance.sample(earlier, chance.randint(0, min(2, len(earlier))))),
                ready_s=chance.choice(MOMENTS),
                queue=chance.choice(QUEUES),
                nbytes=chance.uniform(1, 100),
                usage=tuple((bucket, chance.choice((1.0, 0.5, 3.0))) for bucket in crossed),
                latency_s=chance.choice((0.0, 0.5)),
            )
        )
    return tasks, {bucket: chance.uniform(1, 50) for bucket in BUCKETS}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_error_is_found(plant, monkeypatch):
    graphs = [random_graph(random.Random(seed)) for seed in range(20)]
    for graph in graphs:
        engine_checks.check_simulation(*graph, CHANNELS)
    plant(monkeypatch)
    found = defaultdict(int)
    for graph in graphs:
        try:
            engine_checks.check_simulation(*graph, CHANNELS)
        except (AssertionError, ValueError, IndexError, TypeError) as error:
            found[type(error)] += 1
    assert found[AssertionError] >= 1, f"no property fails: {dict(found)}"

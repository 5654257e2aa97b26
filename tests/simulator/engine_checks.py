"""What must hold in every simulation, checked against the stretches of constant rates that the engine reports."""

from __future__ import annotations

import math
from collections import defaultdict
from heapq import heappop, heappush
from itertools import pairwise

from coarse.simulator.events.engine import simulate

NEAR = 1e-9


def near(one, other):
    return math.isclose(one, other, rel_tol=NEAR, abs_tol=1e-12)


def check_simulation(tasks, capacities, channels=None):
    """Runs `tasks`, checks all properties of the result, and returns it."""
    stretches = []
    outcome = simulate(
        tasks, capacities, channels=channels, observe=lambda *stretch: stretches.append(stretch)
    )
    by_name = {task.name: task for task in tasks}
    assert set(outcome.times) == set(by_name)
    check_stages(tasks, outcome.times)
    check_queues(tasks, outcome.times, channels or {})
    check_time_moves_on(stretches)
    check_flows_start_and_end(tasks, outcome.times, stretches)
    check_bytes(by_name, stretches, outcome.bucket_bytes)
    for _, _, rates in stretches:
        check_capacities(by_name, capacities, rates)
        check_max_min(by_name, capacities, rates)
    return outcome


def check_stages(tasks, times):
    for task in tasks:
        each = times[task.name]
        awaited = [task.ready_s, *(times[name].finished_s for name in task.after)]
        assert each.ready_s == max(awaited), f"{task.name} is ready before or after what it waits for"
        assert each.served_s >= each.ready_s
        assert near(each.first_byte_s, each.served_s + task.overhead_s)
        assert near(each.finished_s, each.last_byte_s + task.latency_s), f"{task.name}: latency"
        if not task.nbytes:
            assert each.last_byte_s == each.first_byte_s
        if not task.queue:
            assert each.served_s == each.ready_s


def check_queues(tasks, times, channels):
    """No more at a time than channels, first ready first, and no channel idle while a task waits."""
    queues = defaultdict(list)
    for task in tasks:
        if task.queue:
            queues[task.queue].append(task)
    for queue, queued in queues.items():
        # A task without duration may make another one ready at the same moment, and has its turn before it.
        queued.sort(key=lambda task: (times[task.name][:2], times[task.name].last_byte_s))
        free_s = [0.0] * channels.get(queue, 1)
        for task in queued:
            each = times[task.name]
            assert each.served_s == max(each.ready_s, heappop(free_s)), f"{task.name} is out of turn"
            heappush(free_s, each.last_byte_s)
        check_ties([task for task in queued if not task.after], times)


def check_ties(queued, times):
    """Among tasks that are ready at the same moment, the one with the lower order comes first."""
    queued = sorted(queued, key=lambda task: (times[task.name].ready_s, task.order, task.name))
    for one, other in pairwise(queued):
        assert times[one.name].served_s <= times[other.name].served_s, f"{one.name} is after {other.name}"


def check_time_moves_on(stretches):
    now_s = 0.0
    for start_s, end_s, _ in stretches:
        assert now_s <= start_s <= end_s, "an event out of order"
        now_s = end_s


def check_flows_start_and_end(tasks, times, stretches):
    """A flow is active from its first byte to its last, in every stretch between (work conservation)."""
    active = defaultdict(list)
    for start_s, end_s, rates in stretches:
        for name in rates:
            active[name].append((start_s, end_s))
    for task in tasks:
        if task.nbytes:
            spans, each = active[task.name], times[task.name]
            assert spans[0][0] == each.first_byte_s
            assert spans[-1][1] == each.last_byte_s
            assert all(one[1] == other[0] for one, other in pairwise(spans))


def check_bytes(by_name, stretches, bucket_bytes):
    moved, crossed = defaultdict(float), defaultdict(float)
    for start_s, end_s, rates in stretches:
        for name, rate in rates.items():
            moved[name] += rate * (end_s - start_s)
    for name, task in by_name.items():
        assert math.isclose(moved[name], task.nbytes, rel_tol=1e-6), f"{name} moved {moved[name]} bytes"
        for bucket, weight in task.usage:
            crossed[bucket] += weight * task.nbytes
    for bucket, nbytes in bucket_bytes.items():
        assert math.isclose(nbytes, crossed[bucket], rel_tol=1e-6), bucket


def loads(by_name, rates):
    load = defaultdict(float)
    for name, rate in rates.items():
        for bucket, weight in by_name[name].usage:
            load[bucket] += weight * rate
    return load


def check_capacities(by_name, capacities, rates):
    for bucket, load in loads(by_name, rates).items():
        assert load <= capacities[bucket] * (1 + NEAR), f"{bucket} carries {load} of {capacities[bucket]}"


def check_max_min(by_name, capacities, rates):
    """Each flow has a full bucket in which no flow is faster."""
    load, fastest = loads(by_name, rates), defaultdict(float)
    for name, rate in rates.items():
        for bucket, weight in by_name[name].usage:
            if weight:
                fastest[bucket] = max(fastest[bucket], rate)
    for name, rate in rates.items():
        assert any(
            weight
            and load[bucket] >= capacities[bucket] * (1 - NEAR)
            and rate >= fastest[bucket] * (1 - NEAR)
            for bucket, weight in by_name[name].usage
        ), f"{name} at {rate} has no bottleneck"

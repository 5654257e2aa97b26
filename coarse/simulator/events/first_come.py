"""Tasks whose transfers take their links first come, first served: the links of the emulator.

A transfer takes its time in each bucket of its path for itself, from the moment at which it is ready: it may wait in
one bucket, and has its time in the others meanwhile (docs/design/emulation.md). It ends with the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from coarse.simulator.events.engine import (
    Outcome,
    Progress,
    arrival_s,
    bytes_of_buckets,
    check_tasks,
    followers,
)
from coarse.simulator.events.tasks import Task, TaskTimes

FAIR, FIRST_COME = "fair", "first-come"
SERVICES = (FAIR, FIRST_COME)
"""How links serve transfers: all at once, max-min fair, or one after the other."""


def simulate_first_come(
    tasks: Iterable[Task], capacities: Mapping[str, float], *, progress: Progress | None = None
) -> Outcome:
    """Runs tasks to their end. Queues have no effect: the emulator has no copy engines.

    Args:
        tasks: Tasks with unique names.
        capacities: Bytes per second of each bucket.
        progress: Called after each task.

    Raises:
        ValueError: As simulate(), queues apart.
    """
    ordered = sorted(tasks, key=lambda task: (task.order, task.name))
    numbers = {task.name: number for number, task in enumerate(ordered)}
    check_tasks(ordered, numbers, capacities)
    following, num_awaited = followers(ordered, numbers)
    ready_s = [task.ready_s for task in ordered]
    waiting = [(task.ready_s, number) for number, task in enumerate(ordered) if not num_awaited[number]]
    heapify(waiting)
    free_s = dict.fromkeys(sorted(capacities), 0.0)
    times: dict[str, TaskTimes] = {}
    while waiting:
        now_s, number = heappop(waiting)
        task = ordered[number]
        times[task.name] = ended = _serve(task, now_s, capacities, free_s)
        for follower in following[number]:
            ready_s[follower] = max(ready_s[follower], ended.finished_s)
            num_awaited[follower] -= 1
            if not num_awaited[follower]:
                heappush(waiting, (ready_s[follower], follower))
        if progress is not None:
            progress(len(times), len(ordered))
    stuck = [task.name for task in ordered if task.name not in times]
    if stuck:
        raise ValueError(f"{len(stuck)} tasks wait for each other in a circle, {stuck[0]} among them")
    return Outcome(
        times={task.name: times[task.name] for task in ordered},
        bucket_bytes=bytes_of_buckets(ordered, free_s),
    )


def _serve(task: Task, now_s: float, capacities: Mapping[str, float], free_s: dict[str, float]) -> TaskTimes:
    """Takes the task's time in each of its buckets."""
    begin_s = last_byte_s = now_s + task.overhead_s
    for bucket, weight in task.usage:
        if task.nbytes and weight:
            free_s[bucket] = max(free_s[bucket], begin_s) + task.nbytes * weight / capacities[bucket]
            last_byte_s = max(last_byte_s, free_s[bucket])
    return TaskTimes(now_s, now_s, begin_s, last_byte_s, arrival_s(last_byte_s, task))

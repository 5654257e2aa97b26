"""Discrete-event engine: tasks whose flows share buckets max-min fairly.

Equal flows form a class with one rate, so that time and memory depend on the number of different flows. Rates for the
same mix of active flows are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from coarse.simulator.events.fair_sharing import SharedBuckets, Usage, fair_rates
from coarse.simulator.events.tasks import Task, TaskTimes

_ALIKE = 1e-12  # relative; events that rounding alone separates happen together
_MOST_CACHED_COUNTS = 1 << 20

Observe = Callable[[float, float, Mapping[str, float]], None]
"""Called for each stretch of time with constant rates: its start and end, and the rate of each active task."""

Progress = Callable[[int, int], None]
"""Called now and then with the number of finished tasks, and of all tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a simulation.

    Args:
        times: Moments of each task.
        bucket_bytes: Bytes that crossed each bucket.
    """

    times: Mapping[str, TaskTimes]
    bucket_bytes: Mapping[str, float]

    @property
    def end_s(self) -> float:
        """When the last task finished."""
        return max((times.finished_s for times in self.times.values()), default=0.0)


def simulate(
    tasks: Iterable[Task],
    capacities: Mapping[str, float],
    *,
    channels: Mapping[str, int] | None = None,
    observe: Observe | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Runs tasks to their end. Draws no random numbers; the order of `tasks` and `capacities` changes no bit.

    Args:
        tasks: Tasks with unique names.
        capacities: Bytes per second of each bucket.
        channels: Tasks that a queue serves at once; 1 for queues that are not named.
        observe: Called for each stretch of time with constant rates.
        progress: Called now and then.

    Raises:
        ValueError: If a name occurs twice or is unknown, a bucket is missing or not above 0 bytes per second, a
            queue has no channel, or tasks wait for each other in a circle.
    """
    return _Run(tasks, capacities, channels or {}).run(observe, progress)


class _Run:
    """One simulation. Tasks are numbered by order and name, so that their sequence in the input has no effect."""

    def __init__(
        self, tasks: Iterable[Task], capacities: Mapping[str, float], channels: Mapping[str, int]
    ) -> None:
        self._tasks = sorted(tasks, key=lambda task: (task.order, task.name))
        numbers = {task.name: number for number, task in enumerate(self._tasks)}
        check_tasks(self._tasks, numbers, capacities)
        self._followers, self._num_awaited = followers(self._tasks, numbers)
        self._capacities = dict(sorted(capacities.items()))
        self._flows = _Flows(self._tasks, self._capacities)
        self._now_s = 0.0
        self._events: list[tuple[float, int, int]] = []  # time, stage that begins, task
        self._queues = {task.queue: _Queue(channels.get(task.queue, 1)) for task in self._tasks if task.queue}
        self._changed_queues: dict[str, None] = {}
        self._moments: list[list[float]] = [[] for _ in self._tasks]
        self._num_finished = 0

    def run(self, observe: Observe | None, progress: Progress | None) -> Outcome:
        for number, task in enumerate(self._tasks):
            if not self._num_awaited[number]:
                self._at(task.ready_s, _READY, number)
        while self._events or self._flows.are_active:
            self._step(observe)
            if progress is not None:
                progress(self._num_finished, len(self._tasks))
        stuck = [task.name for task, moments in zip(self._tasks, self._moments, strict=True) if not moments]
        if stuck:
            raise ValueError(f"{len(stuck)} tasks wait for each other in a circle, {stuck[0]} among them")
        return Outcome(
            times={
                task.name: TaskTimes(*moments)
                for task, moments in zip(self._tasks, self._moments, strict=True)
            },
            bucket_bytes=bytes_of_buckets(self._tasks, self._capacities),
        )

    def _step(self, observe: Observe | None) -> None:
        """Goes to the next event and handles all events of that moment."""
        flow_end_s = self._now_s + self._flows.time_to_next_end_s()
        event_s = self._events[0][0] if self._events else math.inf
        next_s = min(flow_end_s, event_s)
        if observe is not None and self._flows.are_active:
            observe(self._now_s, next_s, self._flows.rates_by_name())
        ended = self._flows.advance(next_s - self._now_s, slack_s=_ALIKE * next_s)
        self._now_s = next_s
        for number in ended:
            self._flow_ended(number)
        while self._events and self._events[0][0] <= self._now_s:
            while self._events and self._events[0][0] <= self._now_s:
                _, stage, number = heappop(self._events)
                self._begin_stage(stage, number)
            self._serve_queues()
        self._serve_queues()

    def _at(self, time_s: float, stage: int, number: int) -> None:
        heappush(self._events, (time_s, stage, number))

    def _begin_stage(self, stage: int, number: int) -> None:
        if stage == _READY:
            self._ready(number)
        elif stage == _FLOWING:
            self._flow(number)
        else:
            self._finish(number)

    def _ready(self, number: int) -> None:
        task = self._tasks[number]
        self._moments[number].append(self._now_s)
        if task.queue:
            self._queues[task.queue].add(self._now_s, number)
            self._changed_queues[task.queue] = None
        else:
            self._serve(number)

    def _serve_queues(self) -> None:
        changed, self._changed_queues = self._changed_queues, {}
        for name in changed:
            while (number := self._queues[name].take()) is not None:
                self._serve(number)

    def _serve(self, number: int) -> None:
        self._moments[number].append(self._now_s)
        self._at(self._now_s + self._tasks[number].overhead_s, _FLOWING, number)

    def _flow(self, number: int) -> None:
        self._moments[number].append(self._now_s)
        if self._tasks[number].nbytes:
            self._flows.start(number)
        else:
            self._flow_ended(number)

    def _flow_ended(self, number: int) -> None:
        task = self._tasks[number]
        self._moments[number].append(self._now_s)
        if task.queue:
            self._queues[task.queue].release()
            self._changed_queues[task.queue] = None
        self._at(arrival_s(self._now_s, task), _FINISHED, number)

    def _finish(self, number: int) -> None:
        self._moments[number].append(self._now_s)
        self._num_finished += 1
        for follower in self._followers[number]:
            self._num_awaited[follower] -= 1
            if not self._num_awaited[follower]:
                self._at(max(self._now_s, self._tasks[follower].ready_s), _READY, follower)


# Stages in the order in which they happen at one moment: those that end tasks first.
_FINISHED, _FLOWING, _READY = range(3)


def arrival_s(last_byte_s: float, task: Task) -> float:
    """When a task whose last byte left at `last_byte_s` finishes."""
    return last_byte_s + task.latency_s


class _Queue:
    """Tasks that an engine with some channels serves in their order."""

    def __init__(self, num_channels: int) -> None:
        if num_channels < 1:
            raise ValueError(f"a queue with {num_channels} channels serves nothing")
        self._num_free = num_channels
        self._waiting: list[tuple[float, int]] = []

    def add(self, ready_s: float, number: int) -> None:
        heappush(self._waiting, (ready_s, number))

    def take(self) -> int | None:
        """The next task to serve, if a channel is free."""
        if not self._num_free or not self._waiting:
            return None
        self._num_free -= 1
        return heappop(self._waiting)[1]

    def release(self) -> None:
        """Frees the channel of a task that is served."""
        self._num_free += 1


class _Flows:
    """The active flows, in classes of equal usage.

    A class counts the bytes that each of its flows has been served since the class was last empty; a flow ends at
    the count at its start plus its bytes.
    """

    def __init__(self, tasks: list[Task], capacities: Mapping[str, float]) -> None:
        self._tasks = tasks
        usages: dict[Usage, int] = {}
        self._class_of = [usages.setdefault(task.usage, len(usages)) for task in tasks]
        self._shared = SharedBuckets.of(list(usages), capacities)
        self._counts = np.zeros(len(usages))
        self._served = np.zeros(len(usages))
        self._next_end = np.full(len(usages), np.inf)
        self._ends: list[list[tuple[float, int]]] = [[] for _ in usages]
        self._rates = np.zeros(len(usages))
        self._rates_of: dict[bytes, NDArray[np.float64]] = {}
        self._are_rates_due = False
        self._num_active = 0

    @property
    def are_active(self) -> bool:
        return self._num_active > 0

    def start(self, number: int) -> None:
        flow_class = self._class_of[number]
        if not self._ends[flow_class]:
            self._served[flow_class] = 0.0
        heappush(self._ends[flow_class], (self._served[flow_class] + self._tasks[number].nbytes, number))
        self._changed(flow_class, 1)

    def time_to_next_end_s(self) -> float:
        """Seconds until the next flow ends at the present rates; infinite without a flow."""
        self._update_rates()
        return float(self._seconds_left().min(initial=np.inf))

    def advance(self, seconds: float, *, slack_s: float) -> list[int]:
        """Serves all flows for `seconds`; returns those that have ended, up to `slack_s` early, in their order."""
        self._update_rates()
        is_ended = self._seconds_left() <= seconds + slack_s
        serve(self._served, self._rates, seconds)
        ended: list[int] = []
        for flow_class in np.flatnonzero(is_ended).tolist():
            self._served[flow_class] = max(self._served[flow_class], self._next_end[flow_class])
            ended += self._pop_ended(flow_class, slack_s)
        return sorted(ended)

    def rates_by_name(self) -> dict[str, float]:
        """The rate of each active task, for observers."""
        return {
            self._tasks[number].name: float(self._rates[flow_class])
            for flow_class, ends in enumerate(self._ends)
            for _, number in ends
        }

    def _pop_ended(self, flow_class: int, slack_s: float) -> list[int]:
        ends, ended = self._ends[flow_class], []
        limit = self._served[flow_class] + self._rates[flow_class] * slack_s
        while ends and ends[0][0] <= limit:
            ended.append(heappop(ends)[1])
        self._changed(flow_class, -len(ended))
        return ended

    def _changed(self, flow_class: int, change: int) -> None:
        ends = self._ends[flow_class]
        self._counts[flow_class] += change
        self._num_active += change
        self._next_end[flow_class] = ends[0][0] if ends else np.inf
        self._are_rates_due = True

    def _seconds_left(self) -> NDArray[np.float64]:
        left, seconds = self._next_end - self._served, np.full(len(self._served), np.inf)
        np.divide(left, self._rates, out=seconds, where=self._rates > 0)
        return seconds

    def _update_rates(self) -> None:
        if not self._are_rates_due:
            return
        self._are_rates_due = False
        mix = self._counts.tobytes()
        rates = self._rates_of.get(mix)
        if rates is None:
            if (len(self._rates_of) + 1) * len(self._counts) > _MOST_CACHED_COUNTS:
                self._rates_of.clear()
            rates = self._rates_of[mix] = fair_rates(self._shared, self._counts)
        self._rates = rates


def serve(served: NDArray[np.float64], rates: NDArray[np.float64], seconds: float) -> None:
    """Adds to `served` the bytes of each class's flows in `seconds`."""
    served += rates * seconds


def followers(tasks: list[Task], numbers: Mapping[str, int]) -> tuple[list[list[int]], list[int]]:
    """The numbers of the tasks that wait for each task, and of how many each of them waits for."""
    following: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for name in set(task.after):
            following[numbers[name]].append(number)
    return following, [len(set(task.after)) for task in tasks]


def bytes_of_buckets(tasks: list[Task], buckets: Iterable[str]) -> dict[str, float]:
    """Bytes that cross each bucket."""
    crossed: dict[str, list[float]] = {name: [] for name in buckets}
    for task in tasks:
        for bucket, weight in task.usage:
            crossed[bucket].append(weight * task.nbytes)
    return {bucket: math.fsum(parts) for bucket, parts in crossed.items()}


def check_tasks(tasks: list[Task], numbers: Mapping[str, int], capacities: Mapping[str, float]) -> None:
    """Raises ValueError for names, buckets and capacities that do not fit together."""
    if len(numbers) < len(tasks):
        names = [task.name for task in tasks]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two tasks are named {twice}")
    for name, capacity in capacities.items():
        if not (capacity > 0 and math.isfinite(capacity)):
            raise ValueError(f"bucket {name}: {capacity} bytes per second is not positive and finite")
    for task in tasks:
        for other in task.after:
            if other not in numbers:
                raise ValueError(f"task {task.name} waits for {other}, which does not exist")
        for bucket, _ in task.usage:
            if bucket not in capacities:
                raise ValueError(f"task {task.name} crosses bucket {bucket}, which does not exist")

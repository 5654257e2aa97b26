"""Rates and times per step over the last seconds, from counters that only grow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from coarse.dashboard.readings import Counters, Reading

_WINDOW_S = 5.0
_LONGEST_WINDOW_S = 30.0
_LEAST_STEPS = 2

_NOTHING = Counters({})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The parts of a worker's mean step, in seconds; see coarse.dashboard.samples.Worker."""

    step_s: float = 0.0
    compute_s: float = 0.0
    blocked_s: float = 0.0
    optimizer_s: float = 0.0
    blocked_by: dict[str, float] = field(default_factory=dict)


class Pace:
    """Averages the newest readings of a job: those of 5 s, or of two steps if these take longer, at most of 30 s.

    The first reading alone is averaged over all steps before it. A pace begins again when counters do, as with each
    attempt of a job.
    """

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()
        self._steps: dict[int, StepTimes] = {}

    def follow(self, reading: Reading) -> None:
        """Takes a newer reading; one without metrics is left out."""
        if not reading.counters.series("coarse_world_size"):
            return
        if self._readings and _shards(reading) < _shards(self._readings[-1]):
            self._readings.clear()
            self._steps.clear()
        self._readings.append(reading)
        while len(self._readings) > 2 and self._is_enough(self._readings[1]):
            self._readings.popleft()

    @property
    def counters(self) -> Counters:
        """The newest metrics; empty before the first ones."""
        return self._ends()[1]

    def rates(self, name: str, *by: str) -> dict[tuple[str, ...], float]:
        """Growth per second of a counter's sums by some of its labels; 0.0 before the first step has ended."""
        first, last = (each.by(name, *by) for each in self._ends())
        return {key: self._per_second(value - first.get(key, 0.0)) for key, value in last.items()}

    def step_times(self, rank: int) -> StepTimes:
        """The parts of a worker's steps; those of earlier steps if none has ended within the window."""
        worker = str(rank)
        if count := self._grown("coarse_step_seconds_count", worker=worker):
            self._steps[rank] = self._mean_step(worker, count)
        return self._steps.get(rank, StepTimes())

    def _mean_step(self, worker: str, count: float) -> StepTimes:
        step_s = self._grown("coarse_step_seconds_sum", worker=worker) / count
        first, last = (each.by("coarse_wait_seconds_sum", "cause", worker=worker) for each in self._ends())
        waited_s = {cause: value - first.get((cause,), 0.0) for (cause,), value in last.items()}
        blocked_by = {cause: s / count for cause, s in waited_s.items() if cause != "background" and s > 0}
        blocked_s = min(step_s, sum(blocked_by.values()))
        optimizer_s = self._grown("coarse_optimizer_seconds_sum", worker=worker) / count
        optimizer_s = min(step_s - blocked_s, optimizer_s)
        return StepTimes(
            step_s=step_s,
            compute_s=step_s - blocked_s - optimizer_s,
            blocked_s=blocked_s,
            optimizer_s=optimizer_s,
            blocked_by=blocked_by,
        )

    def _is_enough(self, first: Reading) -> bool:
        """Whether the readings from `first` on are worth averaging without the older ones."""
        last = self._readings[-1]
        seconds, steps = last.taken_s - first.taken_s, _steps(last) - _steps(first)
        return seconds >= _LONGEST_WINDOW_S or (seconds >= _WINDOW_S and steps >= _LEAST_STEPS)

    def _per_second(self, grown: float) -> float:
        return max(0.0, grown) / self._window_s if self._window_s > 0 else 0.0

    @property
    def _window_s(self) -> float:
        """The time from the first to the last of _ends()."""
        if len(self._readings) > 1:
            return self._readings[-1].taken_s - self._readings[0].taken_s
        return self.counters.largest("coarse_step_seconds_sum")

    def _grown(self, name: str, **labels: str) -> float:
        first, last = (each.total(name, **labels) for each in self._ends())
        return max(0.0, last - first)

    def _ends(self) -> tuple[Counters, Counters]:
        """The counters before and after the window; those before the only reading are 0."""
        if not self._readings:
            return _NOTHING, _NOTHING
        first = self._readings[0].counters if len(self._readings) > 1 else _NOTHING
        return first, self._readings[-1].counters


def _shards(reading: Reading) -> float:
    return reading.counters.total("coarse_pushed_shards_total")


def _steps(reading: Reading) -> float:
    """Steps that have ended, of the worker with the most."""
    return reading.counters.largest("coarse_step_seconds_count")

"""Throughput, workers and goodput of a job whose workers are killed, from the steps that its workers have logged."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Step:
    """A step of one worker; seconds of the monotonic clock.

    Args:
        number: Number of the step, the same on all workers.
        began_s, ended_s: From the choice of the batch to the end of the update.
        counted: Whether the parameters have moved by this worker's gradients.
    """

    number: int
    began_s: float
    ended_s: float
    counted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """The time without a worker: from its kill until the process in its place has model and optimizer."""

    place: int
    killed_s: float
    ready_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLog:
    """What the workers of a job did from one moment to another.

    Args:
        steps: The steps of each place in order, by all processes that had it, before and after these moments too.
        absences: One for each kill.
        batch: Samples of one step of one worker.
        began_s, ended_s: The two moments, on the monotonic clock.
        accuracy: Of the final parameters, on samples that were not trained on.
    """

    steps: Sequence[Sequence[Step]]
    absences: Sequence[Absence]
    batch: int
    began_s: float
    ended_s: float
    accuracy: float

    @property
    def workers(self) -> int:
        """Number of places."""
        return len(self.steps)


def useful_steps(steps: Sequence[Step]) -> list[Step]:
    """The steps of a place that counted and were not rolled back: no later step has their number or less."""
    kept: list[Step] = []
    lowest: float = math.inf
    for step in reversed(steps):
        if step.counted and step.number < lowest:
            kept.append(step)
            lowest = step.number
    return kept[::-1]


def lost_steps(log: JobLog) -> int:
    """How often a step of the job was made in vain: by all workers that made it, in which it did not count."""
    made = [[step for step in steps if log.began_s <= step.ended_s < log.ended_s] for steps in log.steps]
    useful = {step for steps in log.steps for step in useful_steps(steps)}
    in_vain: dict[int, list[int]] = {}
    for steps in made:
        counts = Counter(step.number for step in steps if step not in useful)
        for number in {step.number for step in steps}:
            in_vain.setdefault(number, []).append(counts[number])
    return sum(map(min, in_vain.values()))


def useful_ends(log: JobLog) -> list[float]:
    """When useful steps have ended, on any worker, in order."""
    return sorted(step.ended_s for steps in log.steps for step in useful_steps(steps))


def samples_between(ends: Sequence[float], batch: int, begin_s: float, end_s: float) -> int:
    """Samples of the steps that ended from `begin_s` to before `end_s`."""
    return batch * (bisect.bisect_left(ends, end_s) - bisect.bisect_left(ends, begin_s))


def rate_per_worker(log: JobLog, begin_s: float, end_s: float) -> float:
    """Useful samples per second and worker in a time without kills."""
    samples = samples_between(useful_ends(log), log.batch, begin_s, end_s)
    return samples / (end_s - begin_s) / log.workers


def living(log: JobLog, begin_s: float, end_s: float) -> Iterator[tuple[float, int]]:
    """Stretches of time with the same number of workers that live: seconds, and that number."""
    changes = [moment for each in log.absences for moment in (each.killed_s, each.ready_s)]
    moments = sorted({begin_s, end_s, *(moment for moment in changes if begin_s < moment < end_s)})
    for earlier, later in pairwise(moments):
        absent = {each.place for each in log.absences if each.killed_s <= earlier and later <= each.ready_s}
        yield later - earlier, log.workers - len(absent)


def capacity(log: JobLog, rates: Mapping[int, float], begin_s: float, end_s: float) -> float:
    """Samples that the workers that lived could have made.

    Args:
        log: The job.
        rates: Samples per second of one worker, by the number of workers, without a fault. Fewer workers than the
            fewest here have the rate of the fewest.
        begin_s, end_s: The time in question.
    """
    fewest = min(rates)
    return sum(
        seconds * number * rates[max(number, fewest)] for seconds, number in living(log, begin_s, end_s)
    )


def goodput(log: JobLog, rates: Mapping[int, float]) -> float:
    """Samples that counted as a share of those that the surviving workers could have made.

        goodput = samples / sum over time of  n(t) * r(n(t)) dt

    `samples` are those of useful steps. n(t) is the number of workers that live: a worker does not from its kill
    until the process in its place has imported all it needs and built model and optimizer. What the others do
    meanwhile is the system's affair: if it restarts them, their time is lost. r(n) are the samples per second of one
    of n workers in a time without a fault, under the same system. It depends on n where workers share processors, as
    three do on two cores: two workers are then faster each, while nobody takes the place of the third.
    """
    return _goodput_between(log, rates, log.began_s, log.ended_s)


def goodputs(log: JobLog, rates: Mapping[int, float], width_s: float) -> list[float]:
    """As goodput(), in each whole interval of `width_s`."""
    return [_goodput_between(log, rates, begin_s, begin_s + width_s) for begin_s in _intervals(log, width_s)]


def _goodput_between(log: JobLog, rates: Mapping[int, float], begin_s: float, end_s: float) -> float:
    samples = samples_between(useful_ends(log), log.batch, begin_s, end_s)
    return samples / capacity(log, rates, begin_s, end_s)


def longest_standstill(log: JobLog) -> float:
    """The longest time in seconds in which no step counted."""
    ends = [end for end in useful_ends(log) if log.began_s <= end < log.ended_s]
    return max(later - earlier for earlier, later in pairwise([log.began_s, *ends, log.ended_s]))


def throughput(log: JobLog, width_s: float) -> list[float]:
    """Useful samples per second in each whole interval of `width_s`."""
    ends = useful_ends(log)
    return [
        samples_between(ends, log.batch, begin_s, begin_s + width_s) / width_s
        for begin_s in _intervals(log, width_s)
    ]


def world_sizes(log: JobLog, width_s: float) -> list[int]:
    """Number of workers whose steps counted, in each whole interval of `width_s`."""
    ends = [[step.ended_s for step in useful_steps(steps)] for steps in log.steps]
    return [
        sum(samples_between(each, 1, begin_s, begin_s + width_s) > 0 for each in ends)
        for begin_s in _intervals(log, width_s)
    ]


def _intervals(log: JobLog, width_s: float) -> list[float]:
    return [log.began_s + number * width_s for number in range(int((log.ended_s - log.began_s) / width_s))]

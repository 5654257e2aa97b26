"""Reads the answers and counters of a job's processes at one moment."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coarse.status.address import MEMORY_DEVICE, WORKER, find_addresses
from coarse.status.requests import Answer, ask, ask_for
from coarse.status.responder import METRICS, PLAN, Report

_SAMPLE = re.compile(r"(\w+)\{(.*)\}")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_PATIENCE_S = 2.0  # a busy processor is no fault


class Counters:
    """Metrics of one moment, by name and labels.

    Args:
        samples: Values by Prometheus's notation, as in coarse.metrics.values.Metrics.
    """

    def __init__(self, samples: Mapping[str, float]) -> None:
        self._series: dict[str, list[tuple[dict[str, str], float]]] = {}
        for notation, value in samples.items():
            if match := _SAMPLE.fullmatch(notation):
                labels = dict(_LABEL.findall(match[2]))
                self._series.setdefault(match[1], []).append((labels, float(value)))

    def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """All values of a metric with their labels."""
        return self._series.get(name, [])

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's values that have these labels; 0.0 if there are none."""
        return sum(value for own, value in self.series(name) if labels.items() <= own.items())

    def largest(self, name: str) -> float:
        """The largest of a metric's values; 0.0 if there are none."""
        return max((value for _, value in self.series(name)), default=0.0)

    def by(self, name: str, *by: str, **labels: str) -> dict[tuple[str, ...], float]:
        """The sums of a metric's values that have these labels, by the values of the labels in `by`."""
        sums: dict[tuple[str, ...], float] = {}
        for own, value in self.series(name):
            if labels.items() <= own.items():
                key = tuple(own[each] for each in by)
                sums[key] = sums.get(key, 0.0) + value
        return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The answers of a job's processes at one moment.

    Args:
        taken_s: By time.monotonic().
        time_s: Seconds since the epoch.
        answers: Answers of all processes.
        counters: The metrics of the node; empty if no process has answered.
        plan: The session's decisions: lines, links and memories; empty if no worker has answered.
    """

    taken_s: float
    time_s: float
    answers: tuple[Answer, ...] = ()
    counters: Counters
    plan: Report

    def of(self, role: str) -> dict[int, Answer]:
        """The answers of the workers by rank, or of the memory devices by number."""
        return {each.address.number: each for each in self.answers if each.address.role == role}

    @property
    def pids(self) -> frozenset[int]:
        """The job's processes."""
        return frozenset(each.address.pid for each in self.answers)


def read(job: str) -> Reading:
    """Asks the processes of a job on this node.

    Args:
        job: The beginning of the job's id.

    Raises:
        OSError: If the system does not list its sockets.
    """
    taken_s, time_s = time.monotonic(), time.time()
    answers = tuple(ask(find_addresses(job), timeout_s=_PATIENCE_S))
    plan = _first_answer(_alive(answers, WORKER), PLAN)
    counters = read_counters(answers)
    return Reading(taken_s=taken_s, time_s=time_s, answers=answers, counters=counters, plan=plan)


def read_counters(answers: Iterable[Answer]) -> Counters:
    """The metrics of a node.

    Memory devices are asked first, because their answers cost training processes no time.

    Args:
        answers: Answers of a job's processes.
    """
    asked = [*_alive(answers, MEMORY_DEVICE)[:1], *_alive(answers, WORKER)]
    return Counters(_first_answer(asked, METRICS).get("metrics", {}))


def _alive(answers: Iterable[Answer], role: str) -> list[Answer]:
    return [each for each in answers if each.report is not None and each.address.role == role]


def _first_answer(answers: Iterable[Answer], question: str) -> Report:
    """The answer of the first process that has one; {} if none has."""
    return next((found for each in answers if (found := ask_for(each.address, question))), {})

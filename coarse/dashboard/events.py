"""Finds what happened between two readings of a job, and says it in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from coarse.dashboard.readings import Reading
from coarse.dashboard.samples import CHECKPOINT, FAULT, JOB, ROUTE, Event
from coarse.status.address import WORKER
from coarse.status.requests import Answer

_STALL_S = 5.0
_STALL_STEPS = 3.0
_OLD_S = 60.0


class Changes:
    """Compares each reading of a job with the one before."""

    def __init__(self) -> None:
        self._before: Reading | None = None
        self._counted: Reading | None = None
        self._stalled: set[int] = set()
        self._unheard: set[str] = set()
        self._silent: set[str] = set()
        self._lost: set[str] = set()
        self._decided: tuple[str, ...] = ()

    def follow(self, reading: Reading) -> tuple[Event, ...]:
        """The events since the reading before."""
        texts = [
            *self._coming_and_going(reading),
            *self._silence(reading),
            *self._losses(reading),
            *self._stalls(reading),
            *self._counted_events(reading),
            *self._decisions(reading),
        ]
        self._before = reading
        return tuple(Event(time_s=reading.time_s, kind=kind, text=text) for kind, text in texts)

    def _coming_and_going(self, reading: Reading) -> Iterator[tuple[str, str]]:
        before = () if self._before is None else self._before.answers
        pids = frozenset(each.address.pid for each in before)
        gone = [each for each in before if each.address.pid not in reading.pids]
        new = [each for each in reading.answers if each.address.pid not in pids]
        if names := _names(gone):
            yield JOB, f"{names} {_have(gone)} ended{_last_step(gone)}"
        if names := _names(new):
            yield JOB, f"{names} {_have(new)} begun"

    def _silence(self, reading: Reading) -> Iterator[tuple[str, str]]:
        """Processes that have not answered twice in a row, and those of them that answer again."""
        now = _silent(reading)
        for process in sorted(now.keys() & self._unheard - self._silent):
            yield FAULT, f"{process} does not answer: {now[process]}"
        alive = {each.address.process_with_pid for each in reading.answers if each.report is not None}
        for process in sorted(self._silent & alive):
            yield JOB, f"{process} answers again"
        self._silent = now.keys() & (self._unheard | self._silent)
        self._unheard = set(now)

    def _losses(self, reading: Reading) -> Iterator[tuple[str, str]]:
        reports = [each.report or {} for each in reading.answers]
        lost = {str(each["lost"]): each["lost_s"] for each in reports if "lost" in each}
        for text in sorted(lost.keys() - self._lost):
            if reading.time_s - lost[text] < _OLD_S:
                yield FAULT, text
        self._lost |= lost.keys()

    def _stalls(self, reading: Reading) -> Iterator[tuple[str, str]]:
        waiting = {}
        for rank, answer in reading.of(WORKER).items():
            report = answer.report or {}
            limit_s = max(_STALL_S, _STALL_STEPS * _step_s(reading, rank))
            if report.get("waits_for") and report.get("waits_s", 0.0) >= limit_s:
                waiting[rank] = (
                    f"worker {rank} has been waiting for {report['waits_s']:.0f} s: {report['waits_for']}"
                )
        for rank in sorted(waiting.keys() - self._stalled):
            yield FAULT, waiting[rank]
        for rank in sorted((self._stalled - waiting.keys()) & reading.of(WORKER).keys()):
            yield JOB, f"worker {rank} goes on"
        self._stalled = set(waiting)

    def _counted_events(self, reading: Reading) -> Iterator[tuple[str, str]]:
        if not reading.counters.series("coarse_world_size"):
            return
        before, self._counted = self._counted, reading
        if before is None:
            return
        restarts = int(reading.counters.largest("coarse_restarts"))
        if restarts > before.counters.largest("coarse_restarts"):
            yield JOB, f"the workers have been restarted: attempt {restarts + 1}"
            return
        for name, kind, text in _COUNTED:
            if (grown := reading.counters.total(name) - before.counters.total(name)) > 0:
                yield kind, text.format(grown)
        yield from _saves(before, reading)

    def _decisions(self, reading: Reading) -> Iterator[tuple[str, str]]:
        decided = tuple(map(str, reading.plan.get("decisions", ())))
        if not decided:
            return
        if self._decided:
            for line in decided:
                if line not in self._decided:
                    yield ROUTE, line
        self._decided = decided


_COUNTED = (
    ("coarse_replans_total", ROUTE, "routes or dual synchronisation have changed"),
    ("coarse_refused_routes_total", ROUTE, "memory devices have refused routes; simpler ones are used"),
    ("coarse_snapshots_lost_total", FAULT, "{:.0f} snapshots were given up because their pool was full"),
)


def _saves(before: Reading, now: Reading) -> Iterator[tuple[str, str]]:
    names = ("saves_total", "written_bytes_total", "save_seconds_sum", "save_seconds_count")
    saves, written, seconds, count = (_grown(before, now, f"coarse_checkpoint_{name}") for name in names)
    outcomes = {
        outcome: _grown(before, now, "coarse_checkpoint_saves_total", outcome=outcome)
        for outcome in ("saved", "failed", "skipped")
    }
    if saves <= 0:
        return
    if outcomes["saved"] > 0:
        took = f" in {seconds / count:.2g} s" if count > 0 else ""
        yield CHECKPOINT, f"a checkpoint of {_size(written)} was saved{took}"
    if outcomes["failed"] > 0:
        yield FAULT, "a checkpoint could not be saved; the log of the worker says why"
    if outcomes["skipped"] > 0:
        yield CHECKPOINT, "a checkpoint was skipped, because the save before took until it was due"


def _grown(before: Reading, now: Reading, name: str, **labels: str) -> float:
    return now.counters.total(name, **labels) - before.counters.total(name, **labels)


def _step_s(reading: Reading, rank: int) -> float:
    """A worker's mean step since its start."""
    count, seconds = (
        reading.counters.total(f"coarse_step_seconds_{part}", worker=str(rank)) for part in ("count", "sum")
    )
    return seconds / count if count else 0.0


def _silent(reading: Reading) -> dict[str, str]:
    """The state of each process that does not answer, in words, by its name."""
    return {each.address.process_with_pid: each.state for each in reading.answers if each.report is None}


def _names(answers: Sequence[Answer]) -> str:
    """Processes in words: "workers 0 to 3 and md0"."""
    of_workers = sorted(each.address.number for each in answers if each.address.role == WORKER)
    devices = sorted(each.address.number for each in answers if each.address.role != WORKER)
    parts = []
    if of_workers:
        parts.append(f"worker{'s' * (len(of_workers) > 1)} {ranges(of_workers)}")
    if devices:
        parts.append(f"memory device{'s' * (len(devices) > 1)} {ranges(devices)}")
    return " and ".join(parts)


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in words: [0, 1, 2, 5] is "0 to 2, 5"."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _have(answers: Sequence[Answer]) -> str:
    return "has" if len(answers) == 1 else "have"


def _last_step(gone: Sequence[Answer]) -> str:
    steps = [each.report["step"] for each in gone if each.report and "step" in each.report]
    return f" after step {min(steps)}" if steps else ""


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"

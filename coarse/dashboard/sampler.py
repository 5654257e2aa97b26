"""Makes samples of a running job: what its processes say, with rates over the last seconds and events."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from coarse.dashboard.events import Changes, ranges
from coarse.dashboard.pace import Pace
from coarse.dashboard.readings import Counters, Reading, read
from coarse.dashboard.samples import (
    AWAITED,
    OVER,
    RUNS,
    SILENT,
    STARTS,
    TRAINS,
    WAITS,
    Checkpoints,
    Device,
    Event,
    Link,
    MemoryUse,
    Sample,
    Worker,
)
from coarse.status.address import MEMORY_DEVICE, WORKER
from coarse.status.processes import private_memory_bytes
from coarse.status.requests import Answer
from coarse.status.responder import Report

_SHORT_WAIT_S = 1.0
_SLOW = 1.1
_ELSEWHERE = "other nodes"
_SNAPSHOTS = "snapshots"


class Sampler:
    """Samples one job. Call sample() about once a second, from one thread; tell() from any.

    Example:
        >>> sampler = Sampler("0f3a")  # or "", if only one job of this user runs on this node
        >>> sampler.sample().workers[0].blocked_s
        0.012

    Args:
        job: The beginning of the job's id, as `coarse status` names it.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._number = 0
        self._pace = Pace()
        self._changes = Changes()
        self._told: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._last: Sample | None = None

    def tell(self, kind: str, text: str) -> None:
        """Adds an event that the job's processes cannot tell, to the next sample."""
        self._told.put(Event(time_s=time.time(), kind=kind, text=text))

    def sample(self) -> Sample:
        """The job's state now.

        Raises:
            OSError: If the system does not list its sockets.
        """
        reading = read(self._job)
        self._pace.follow(reading)
        self._number += 1
        events = (*self._changes.follow(reading), *self._take_told())
        if reading.answers:
            self._last = self._running(reading, events)
            return self._last
        return self._without_processes(reading, events)

    def _take_told(self) -> Iterator[Event]:
        while not self._told.empty():
            yield self._told.get()

    def _without_processes(self, reading: Reading, events: tuple[Event, ...]) -> Sample:
        phase = AWAITED if self._last is None else OVER
        last = self._last
        return Sample(
            number=self._number,
            time_s=reading.time_s,
            phase=phase,
            job=self._job if last is None else last.job,
            program="" if last is None else last.program,
            step=0 if last is None else last.step,
            restarts=0 if last is None else last.restarts,
            checkpoints=Checkpoints() if last is None else last.checkpoints,
            decisions=() if last is None else last.decisions,
            events=events,
        )

    def _running(self, reading: Reading, events: tuple[Event, ...]) -> Sample:
        workers = tuple(self._worker(rank, each) for rank, each in reading.of(WORKER).items())
        devices = tuple(
            self._device(number, each, reading) for number, each in reading.of(MEMORY_DEVICE).items()
        )
        slowest, why_slow = slowest_of(workers)
        longest_s = max((each.step_s for each in workers), default=0.0)
        counters = reading.counters
        return Sample(
            number=self._number,
            time_s=reading.time_s,
            phase=RUNS,
            job=reading.answers[0].address.job,
            program=_program(reading.answers),
            machine=str(reading.plan.get("machine", "")),
            world_size=int(counters.largest("coarse_world_size")),
            restarts=int(counters.largest("coarse_restarts")),
            step=min((each.step for each in workers), default=0),
            steps_per_s=1 / longest_s if longest_s else 0.0,
            samples_per_s=sum(each.samples_per_s for each in workers),
            slowest=slowest,
            why_slow=why_slow,
            workers=workers,
            devices=devices,
            links=tuple(links_of(self._pace, reading.plan)),
            memory=tuple(_memory(workers, devices, reading)),
            checkpoints=_checkpoints(counters),
            nodes=tuple(tuple(map(int, ranks)) for ranks in reading.plan.get("nodes", ())),
            decisions=tuple(map(str, reading.plan.get("decisions", ()))),
            events=events,
        )

    def _worker(self, rank: int, answer: Answer) -> Worker:
        report = answer.report or {}
        return Worker(
            rank=rank,
            pid=answer.address.pid,
            state=_state(answer),
            doing=_doing(answer),
            step=max(int(report.get("step", 0)), self._last_step(rank, answer.address.pid)),
            waits_s=float(report.get("waits_s", 0.0)),
            private_bytes=private_memory_bytes(answer.address.pid),
            **figures_of_worker(self._pace, rank),
        )

    def _last_step(self, rank: int, pid: int) -> int:
        """The step that a process has told last, when it does not answer now."""
        before = () if self._last is None else self._last.workers
        return next((each.step for each in before if (each.rank, each.pid) == (rank, pid)), 0)

    def _device(self, number: int, answer: Answer, reading: Reading) -> Device:
        report, memories = answer.report or {}, reading.plan.get("memories", ())
        return Device(
            number=number,
            pid=answer.address.pid,
            doing=_doing(answer),
            is_silent=answer.report is None,
            memory=str(memories[number]) if number < len(memories) else "",
            serves=tuple(report.get("serves", ())),
            **figures_of_device(self._pace, number),
        )


def figures_of_worker(pace: Pace, rank: int) -> dict[str, Any]:
    """The fields of Worker that follow from counters: times of a step and rates."""
    samples_per_s = pace.rates("coarse_samples_total", "worker").get((str(rank),), 0.0)
    return {**asdict(pace.step_times(rank)), "samples_per_s": samples_per_s}


def figures_of_device(pace: Pace, number: int) -> dict[str, Any]:
    """The fields of Device that follow from counters: rates, shares, numbers and bytes."""
    name = f"md{number}"

    def total(metric: str) -> int:
        return int(pace.counters.total(metric, device=name))

    def rate(metric: str) -> float:
        return pace.rates(metric, "device").get((name,), 0.0)

    cores = total("coarse_sync_cores")
    busy = min(1.0, rate("coarse_sync_core_busy_seconds_total") / cores) if cores else 0.0
    return {
        "reduced_bytes_per_s": rate("coarse_reduced_bytes_total"),
        "busy": busy,
        "sync_cores": cores,
        "queue_shards": total("coarse_queue_shards"),
        "reserved_bytes": total("coarse_memory_bytes"),
        "pool_bytes": total("coarse_snapshot_pool_bytes"),
        "pool_limit_bytes": total("coarse_snapshot_pool_limit_bytes"),
    }


def links_of(pace: Pace, plan: Report) -> Iterator[Link]:
    """The links in the counters, with their capacity by the plan."""
    limits = {(each["worker"], each["device"]): each for each in plan.get("links", ())}
    rates: dict[tuple[str, str], dict[str, float]] = {}
    pushed = pace.rates("coarse_pushed_bytes_total", "worker", "device", "algorithm")
    for (worker, device, algorithm), rate in pushed.items():
        rates.setdefault((worker, device), {})[algorithm] = rate
    for (worker, device), by_algorithm in rates.items():
        limit = limits.get((int(worker), int(device.removeprefix("md"))), {})
        yield Link(
            source=f"worker {worker}",
            target=device,
            bytes_per_s=sum(by_algorithm.values()),
            limit_bytes_per_s=float(limit.get("bytes_per_s", 0.0)),
            limit_kind=str(limit.get("kind", "")),
            algorithms=tuple(by_algorithm),
        )
    for (device,), rate in pace.rates("coarse_node_sent_bytes_total", "device").items():
        if pace.counters.total("coarse_node_sent_bytes_total", device=device):
            yield Link(source=device, target=_ELSEWHERE, bytes_per_s=rate)


def _state(answer: Answer) -> str:
    if answer.report is None:
        return SILENT
    if "step" not in answer.report:
        return STARTS
    return WAITS if answer.report["waits_for"] and answer.report["waits_s"] >= _SHORT_WAIT_S else TRAINS


def _doing(answer: Answer) -> str:
    if answer.report is not None and answer.report.get("waits_for"):
        return f"waits for {answer.report['waits_for']}"
    return answer.describe_place()


def _program(answers: Sequence[Answer]) -> str:
    of_workers = [each.report for each in answers if each.address.role == WORKER and each.report]
    return str(of_workers[0].get("program", "")) if of_workers else ""


def slowest_of(workers: Sequence[Worker]) -> tuple[int, str]:
    """The worker for which the others wait: its own part of a step is the longest."""
    trained = [each for each in workers if each.step_s]
    if len(trained) < 2:
        return -1, ""
    slowest = max(trained, key=lambda each: each.own_s)
    usual_s = statistics.median(each.own_s for each in trained if each is not slowest)
    if slowest.own_s < _SLOW * usual_s:
        return -1, ""
    return slowest.rank, (
        f"worker {slowest.rank} takes {_duration(slowest.own_s)} of its own for a step, the others "
        f"{_duration(usual_s)} (median); they wait for it"
    )


def _memory(workers: Sequence[Worker], devices: Sequence[Device], reading: Reading) -> Iterator[MemoryUse]:
    for worker in workers:
        yield MemoryUse(owner=f"worker {worker.rank}", what="private", num_bytes=worker.private_bytes)
    answers = reading.of(MEMORY_DEVICE)
    for device in devices:
        reserved = (answers[device.number].report or {}).get("reserved", {})
        if _SNAPSHOTS in reserved:  # their address space is larger than their limit
            reserved[_SNAPSHOTS] = device.pool_bytes
        for what, num_bytes in reserved.items():
            yield MemoryUse(owner=f"md{device.number}", what=what, num_bytes=num_bytes)


def not_shown(workers: Sequence[Worker], nodes: Sequence[Sequence[int]]) -> Iterator[str]:
    """The nodes of which no worker is shown, in words, such as "node 1 (workers 2, 3)".

    Args:
        workers: Those that are shown.
        nodes: Ranks of the workers of each node.
    """
    here = {worker.rank for worker in workers}
    for node, ranks in enumerate(nodes):
        if here.isdisjoint(ranks):
            yield f"node {node} (worker{'s' * (len(ranks) > 1)} {ranges(ranks)})"


def _checkpoints(counters: Counters) -> Checkpoints:
    saves = {
        outcome: int(number)
        for (outcome,), number in counters.by("coarse_checkpoint_saves_total", "outcome").items()
    }
    count = counters.total("coarse_checkpoint_save_seconds_count")
    seconds = counters.total("coarse_checkpoint_save_seconds_sum")
    return Checkpoints(
        saved=saves.get("saved", 0),
        failed=saves.get("failed", 0),
        skipped=saves.get("skipped", 0),
        written_bytes=int(counters.total("coarse_checkpoint_written_bytes_total")),
        save_s=seconds / count if count else 0.0,
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

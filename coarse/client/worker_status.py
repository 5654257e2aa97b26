"""A worker's answers to `coarse status`, and its notice of a wait that is long compared with its steps.

All of it runs in the responder's thread, once a second or when somebody asks: it costs no time per step.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from coarse.client.client import Client
from coarse.env import notes_pipe
from coarse.status.address import WORKER, Address, find_addresses, job_id
from coarse.status.launcher_notes import Note, tell_launcher
from coarse.status.processes import peak_memory_bytes
from coarse.status.requests import Answer, ask
from coarse.status.responder import METRICS, PLAN, Report, Responder, try_respond
from coarse.status.stacks import read_stacks

_LEAST_STALL_S = 5.0
_STALL_STEPS = 10.0
_LEAST_STEPS = 10
_KEPT_STEPS = 256

WeakPlan: TypeAlias = Callable[[], Callable[[], Report] | None]
"""Returns what describes a session's decisions; None if the session is gone."""


class WorkerStatus:
    """The status of one worker.

    Args:
        address: Address of this worker.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client: weakref.ref[Client] | None = None
        self._describe_plan: WeakPlan = lambda: None
        self._progress = (0, 0)
        self._step_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._stepped_s = self._progressed_s = time.monotonic()
        self._waits_since_s: float | None = None
        self._has_told = False
        self._began_s = time.monotonic()

    def follow(self, client: Client, describe_plan: WeakPlan) -> None:
        """Reports about a client from now on, whose notices also say what late workers do.

        Args:
            client: The worker's client; not kept alive.
            describe_plan: Describes the session's decisions; a weakref.WeakMethod.
        """
        self._began_s = time.monotonic()
        self._client = weakref.ref(client)
        self._describe_plan = describe_plan
        client.explain_worker = self.explain_worker

    def explain_worker(self, name: str) -> str:
        """The activity of another worker of this node, as it answers; "" if no worker of this name answers here.

        Args:
            name: As in Client.names.
        """
        try:
            asked = [each for each in find_addresses(self._address.job) if each.process_with_pid == name]
        except OSError:
            return ""
        return "".join(map(_explain, ask(asked[:1])))

    @property
    def has_client(self) -> bool:
        """Whether the session has begun."""
        return self._client is not None

    def look(self) -> None:
        """Once a second: follows the worker's progress; logs a wait that is long for its steps."""
        client, now = self._open_client(), time.monotonic()
        if client is None:
            return
        progress = (client.num_steps, client.num_waits)
        if progress != self._progress:
            self._follow_progress(progress, now)
        if not any(stack.is_in_coarse for stack in read_stacks()):
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = now
        elif self._is_stalled(client, now - self._waits_since_s):
            self._has_told = True
            client.tell_late(now - self._waits_since_s)

    def summary(self) -> Note:
        """How the session went: steps, seconds, samples, and peak memory in bytes."""
        client, worker = self._open_client(), str(self._address.number)
        note: Note = {"ended": self._address.number, "seconds": time.monotonic() - self._began_s}
        note |= {"steps": self._progress[0], "peak_bytes": peak_memory_bytes(self._address.pid)}
        if client is None:
            return note
        metrics = client.read_metrics()
        waits, of_background = (
            metrics.total("coarse_wait_seconds_sum", worker=worker, **labels)
            for labels in ({}, {"cause": "background"})
        )
        return note | {
            "steps": client.count_steps(),
            "samples": metrics.total("coarse_samples_total", worker=worker),
            "steps_s": metrics.total("coarse_step_seconds_sum", worker=worker),
            "blocked_s": waits - of_background,
            "device_peak_bytes": max(map(peak_memory_bytes, client.device_pids())),
        }

    def report(self) -> Report:
        """Step, what the worker waits for, and since when; times in seconds."""
        client = self._open_client()
        if client is None:
            return {"is_starting": self._client is None}
        self.look()
        now = time.monotonic()
        is_waiting = self._waits_since_s is not None
        return {
            "step": client.count_steps(),
            "synchronised_s": now - self._progressed_s,
            "waits_s": 0.0 if self._waits_since_s is None else now - self._waits_since_s,
            "waits_for": client.describe_wait() if is_waiting else "",
        }

    def metrics(self) -> Report:
        """The metrics of this node, by Prometheus's notation; {} without a session."""
        client = self._open_client()
        return {} if client is None else {METRICS: dict(client.read_metrics())}

    def plan(self) -> Report:
        """The session's decisions; {} without a session."""
        describe = self._describe_plan()
        return {} if describe is None or self._open_client() is None else describe()

    def _open_client(self) -> Client | None:
        client = None if self._client is None else self._client()
        return None if client is None or client.is_closed else client

    def _follow_progress(self, progress: tuple[int, int], now: float) -> None:
        num_steps = progress[0] - self._progress[0]
        if num_steps > 0:
            self._step_s.append((now - self._stepped_s) / num_steps)
            self._stepped_s = now
        self._progress, self._progressed_s = progress, now
        self._waits_since_s, self._has_told = None, False

    def _is_stalled(self, client: Client, waited_s: float) -> bool:
        if self._has_told or self._progress[0] < _LEAST_STEPS or not self._step_s:
            return False
        limit_s = max(_LEAST_STALL_S, _STALL_STEPS * _percentile_99(self._step_s))
        # Later than the usual notice, that one suffices.
        return limit_s <= waited_s and limit_s < client.warn_after_s


class AnsweringWorker:
    """A worker's status with the responder that tells it; without one if the system allows no socket.

    Args:
        status: Status of the worker.
        responder: Tells it to other processes; None if it cannot.
    """

    def __init__(self, status: WorkerStatus, responder: Responder | None) -> None:
        self._status = status
        self._responder = responder
        self._pid = os.getpid()
        self._is_closed = False

    def follow(self, client: Client, describe_plan: WeakPlan) -> None:
        """WorkerStatus.follow()."""
        self._status.follow(client, describe_plan)

    def close(self) -> None:
        """Stops answering, and tells `coarse run` how the session went. Idempotent; does nothing in a fork."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        if self._status.has_client:
            tell_launcher(notes_pipe(), self._status.summary())
        if self._responder is not None:
            self._responder.close()


def answer_as_worker(job: str, rank: int) -> AnsweringWorker:
    """Begins to answer `coarse status`, if the system allows it.

    Args:
        job: Name of the job, as in Attempt.
        rank: Rank of this worker.
    """
    address = Address.of_this_process(job_id(job), WORKER, rank)
    status = WorkerStatus(address)
    more = {METRICS: status.metrics, PLAN: status.plan}
    return AnsweringWorker(status, try_respond(address, status.report, status.look, more))


def _explain(answer: Answer) -> str:
    last = (
        ""
        if answer.report is None
        else f"; it last synchronised {answer.report.get('synchronised_s', 0.0):.0f} s ago"
    )
    return f"{answer.describe_place()}{last}"


def _percentile_99(values: deque[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]

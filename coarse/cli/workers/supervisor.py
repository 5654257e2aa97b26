"""Starts the workers of a job, forwards their output, ends all of them when one fails, and restarts them."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from coarse.cli.workers.failure import (
    WorkerExit,
    first_failure,
    headline,
    report,
    reports_own_error,
    signal_name,
)
from coarse.cli.workers.join_requests import JoinRequest, JoinRequests
from coarse.cli.workers.output import Console, OutputPipe, Piece, StartupNotes, Tail, open_consoles
from coarse.cli.workers.preloader.handle import ForkedWorker, Preloader, PreloaderLostError
from coarse.cli.workers.processes import (
    FORWARDED_SIGNALS,
    NOTIFYING_SIGNALS,
    descendants,
    die_with_parent,
    signal_all,
    sweep,
)
from coarse.cli.workers.run_notes import RunNotes
from coarse.dashboard.samples import FAULT, JOB
from coarse.env import Attempt
from coarse.errors import CoarseError
from coarse.machine.out_of_memory import OutOfMemoryWatch
from coarse.status.launcher_notes import NotesPipe
from coarse.wire.persistent_sessions import forget_job, persistent_pids

REPORT_GRACE_S = 1.0
"""Time for the other workers to report their own errors after a failure."""

TEARDOWN_GRACE_S = 2.0
"""Additional time for workers that have reported an error to end by themselves."""

TERMINATE_GRACE_S = 5.0
"""Time for workers to end after the first SIGTERM."""

ORPHANED_GRACE_S = 1.2
"""Time for workers to end after the launcher was killed."""

LEFTOVER_GRACE_S = 0.5
"""Time for remaining child processes to end after the last worker: first by themselves, then after SIGTERM."""

_KILL_INTERVAL_S = 0.05
"""Time between two rounds of SIGKILL, because killed processes may have started others."""

_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 30.0
"""Time before another worker is started in place of one that has ended before it took part; it doubles each time."""

_CANNOT_START = 126


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The workers to start, and the destinations of their output.

    Args:
        command: Program and arguments, the same for each worker.
        environments: The whole environment of each worker, and of each that may join later.
        num_vacant: How many of these, the last ones, may join later.
        shutdown_timeout_s: Time for workers to end after a signal to the launcher.
        first_rank: Rank of the first worker; the others follow.
        plain_first: Whether the first worker gets the launcher's own stdout and stderr.
        log_dir: An existing directory for one file per worker; None for no files.
        console_streams: Those of "stdout" and "stderr" that go to the launcher's; the others go only to the log.
        max_restarts: Number of times that all workers are restarted after one has failed; new workers in place of
            lost ones count, too.
        min_workers: Workers that suffice to go on after others have failed; 0 if the first failure ends all.
        has_other_nodes: Whether other launchers start further workers, which count for `min_workers`, too.
        replaces_workers: Whether to start a new worker in place of each that has failed while the others go on.
        takes_workers: Whether to start further workers in vacant places, when `coarse run --join` asks for it.
        preload: Modules that are imported once, in a process from which all workers are forked.
        restart_variables: Returns changed variables of every environment, given the number of the restart.
        is_quiet: Whether to print neither the session's decisions nor a summary of the job.
        tell: Takes events for the dashboard: kind, as in coarse.dashboard.samples, and text.
    """

    command: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...]
    shutdown_timeout_s: float
    num_vacant: int = 0
    first_rank: int = 0
    plain_first: bool = False
    log_dir: Path | None = None
    console_streams: frozenset[str] = frozenset({"stdout", "stderr"})
    max_restarts: int = 0
    min_workers: int = 0
    has_other_nodes: bool = False
    replaces_workers: bool = False
    takes_workers: bool = False
    preload: tuple[str, ...] = ()
    restart_variables: Callable[[int], Mapping[str, str]] = lambda attempt: {}
    is_quiet: bool = False
    tell: Callable[[str, str], None] = lambda kind, text: None

    def __post_init__(self) -> None:
        if not self.command or self.num_workers < 1:
            raise ValueError("a job needs a command and at least one worker")
        if self.log_dir is None and len(self.console_streams) < 2:
            raise ValueError("output that is kept from the console needs a log directory")

    @property
    def num_workers(self) -> int:
        """Number of workers at the start, all on this node."""
        return len(self.environments) - self.num_vacant

    @property
    def least_here(self) -> int:
        """Workers of this node that suffice: with other nodes, memory devices count those of all nodes."""
        return min(self.min_workers, 1) if self.has_other_nodes else self.min_workers

    @property
    def job(self) -> str:
        """Name of the job, by which a restarted worker finds kept memory devices."""
        return Attempt.from_environment(self.environments[0]).job

    def is_plain(self, rank: int) -> bool:
        """Whether this worker writes directly to the launcher's stdout and stderr."""
        return (
            self.log_dir is None and rank == self.first_rank and (self.plain_first or self.num_workers == 1)
        )


@dataclass(slots=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes] | ForkedWorker
    tail: Tail
    pipes: list[OutputPipe] = field(default_factory=list)
    was_stopped: bool = False
    evidence: str = ""
    had_failed: bool = False
    """Whether the launcher stopped it after it had reported its own error, but had not ended."""
    ended_s: float = 0.0
    is_entering: bool = False
    """Whether it has the place of a lost worker, and does not take part yet."""
    left_at: int | None = None
    """The step after which it has left while the others go on; None if it has not."""
    request: JoinRequest | None = None
    """The request by which it joins; None if the launcher has started it by itself."""

    def exit(self) -> WorkerExit:
        return WorkerExit(
            rank=self.rank,
            pid=self.process.pid,
            returncode=self.process.returncode,
            stderr_tail=self.tail.text,
            was_stopped=self.was_stopped and not self.had_failed,
            evidence=self.evidence,
            failed_s=self.ended_s if self.tail.traceback_s is None else self.tail.traceback_s,
        )


class CannotStartError(CoarseError):
    """A worker's program could not be started."""


class Supervisor:
    """One run of one job. Use it once, in the main thread of a process without other children.

    After a failure, the other workers have REPORT_GRACE_S to report errors. Then they get SIGTERM; those that have
    reported an error get it TEARDOWN_GRACE_S later. TERMINATE_GRACE_S after that, they get SIGKILL. A signal to this
    process goes to all workers at once, followed by SIGKILL when their time to end is over. A second signal kills
    them at once.
    """

    def __init__(self, plan: JobPlan) -> None:
        self._plan = plan
        self._launcher = os.getppid()
        self._consoles = dict(zip(("stdout", "stderr"), open_consoles(), strict=True))
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, _Worker] = {}
        self._workers: list[_Worker] = []
        self._ended: list[_Worker] = []
        self._steps: list[tuple[float, Callable[[], None]]] = []
        self._interrupted_by: int | None = None
        self._unread: OSError | None = None
        self._is_failing = False
        self._is_session_over = False
        self._lost: list[_Worker] = []
        self._left: list[_Worker] = []
        self._changed: Mapping[str, str] = {}
        self._invitation: Mapping[str, object] | None = None
        self._num_replacements = 0
        self._replacement_delay_s = 0.0
        self._replaced: list[int] = []
        self._to_replace: set[int] = set()  # ranks of workers that start later
        self._joined: list[int] = []
        self._started_s = time.monotonic()
        self._is_ending = False
        self._has_children = True
        self._num_restarts = 0
        self._memory_watch = OutOfMemoryWatch()
        self._notes_pipe = NotesPipe()
        self._notes = RunNotes(is_quiet=plan.is_quiet)
        self._preloader: Preloader | None = None
        self._preloader_pipes: list[OutputPipe] = []
        self._selector.register(self._notes_pipe.fd, selectors.EVENT_READ, self._take_notes)
        self._join_requests: JoinRequests | None = None
        if plan.takes_workers:
            with suppress(OSError):  # the system allows no such socket
                self._join_requests = JoinRequests(plan.job, self._selector, self._take_join_request)

    def run(self) -> int:
        """Runs the job to its end and returns its exit code; no process of the job remains."""
        with self._signals_watched():
            try:
                self._begin()
                while self._has_children:
                    self._wait()
                    if not (self._running or self._is_preloading or self._is_ending):
                        self._follow_last_exit()
            except CannotStartError as error:
                self._say(f"coarse run: {error}\n")
                return _CANNOT_START
            finally:
                self._dismiss_preloader()
                sweep(reap=self._reap)
                forget_job(self._plan.job)  # its memory devices were killed
                self._drain()
                self._take_notes()
                self._notes_pipe.close()
                if self._join_requests is not None:
                    self._join_requests.close()
        return self._verdict()

    def _begin(self) -> None:
        if self._plan.preload:
            self._start_preloader()
        else:
            self._start()

    def _start(self) -> None:
        try:
            self._start_workers()
        except OSError as error:
            raise CannotStartError(
                f"cannot start worker {self._plan.first_rank + len(self._running)}: {error}"
            ) from error

    def _start_workers(self) -> None:
        self._changed = self._plan.restart_variables(self._num_restarts) if self._num_restarts else {}
        for local_rank in range(self._plan.num_workers):
            self._add(self._spawn(local_rank, self._environment_of(local_rank)))

    def _environment_of(self, local_rank: int) -> dict[str, str]:
        notes = {"COARSE_NOTES_PIPE": self._notes_pipe.name}
        return {**self._plan.environments[local_rank], **self._changed, **notes}

    def _add(self, worker: _Worker) -> None:
        self._workers.append(worker)
        self._running[worker.process.pid] = worker
        self._watch(worker.pipes)

    def _watch(self, pipes: Collection[OutputPipe]) -> None:
        for pipe in pipes:
            self._selector.register(pipe.fd, selectors.EVENT_READ, partial(self._pump, pipe))

    def _spawn(self, local_rank: int, environment: Mapping[str, str]) -> _Worker:
        rank = self._plan.first_rank + local_rank
        has_pipes = not self._plan.is_plain(rank)
        process = self._fork(local_rank, environment, has_pipes=has_pipes)
        worker = _Worker(rank, process or self._execute(local_rank, environment, has_pipes=has_pipes), Tail())
        if has_pipes:
            worker.pipes.extend(self._pipes(worker))
        return worker

    def _execute(
        self, local_rank: int, environment: Mapping[str, str], *, has_pipes: bool
    ) -> subprocess.Popen[bytes]:
        output = subprocess.PIPE if has_pipes else None
        return subprocess.Popen(
            self._plan.command,
            bufsize=0,
            env=environment,
            pass_fds=(self._notes_pipe.inherited_fd,),
            stdin=None if local_rank == 0 else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
        )

    def _pipes(self, worker: _Worker) -> Iterator[OutputPipe]:
        is_new = all(each.rank != worker.rank for each in self._workers)
        log_fd = _open_log(self._plan.log_dir, worker.rank, is_new=is_new)
        prefix = (
            b"" if worker.rank == self._plan.first_rank and self._is_unmarked else b"[w%d] " % worker.rank
        )
        for name in ("stdout", "stderr"):
            tail = worker.tail if name == "stderr" else None
            yield OutputPipe(
                _take_over(getattr(worker.process, name)),
                prefix,
                self._console(name),
                log_fd,
                tail,
                instead=self._consoles[name],
                notes=self._startup_notes(worker.rank),
                on_unread=self._end_unread,
            )

    def _startup_notes(self, rank: int) -> StartupNotes | None:
        environment = self._plan.environments[rank - self._plan.first_rank]
        level = environment.get("TF_CPP_MIN_LOG_LEVEL")
        return None if level == "0" else StartupNotes(is_shown=level is None)

    @property
    def _is_unmarked(self) -> bool:
        return self._plan.plain_first or self._plan.num_workers == 1

    def _console(self, name: str) -> Console | None:
        return self._consoles[name] if name in self._plan.console_streams else None

    # ---- the process from which workers are forked ----

    @property
    def _is_preloading(self) -> bool:
        """Whether no worker has started yet, because modules are imported."""
        return self._preloader is not None and not self._preloader.is_ready

    def _start_preloader(self) -> None:
        try:
            self._preloader = Preloader(
                self._plan.command,
                self._environment_of(0),
                self._plan.preload,
                pass_fds=(self._notes_pipe.inherited_fd,),
            )
        except OSError as error:
            raise CannotStartError(f"cannot start worker {self._plan.first_rank}: {error}") from error
        self._preloader_pipes = [self._preloader_pipe(name) for name in ("stdout", "stderr")]
        self._watch(self._preloader_pipes)
        self._selector.register(self._preloader, selectors.EVENT_READ, self._take_preloader_answer)

    def _preloader_pipe(self, name: str) -> OutputPipe:
        assert self._preloader is not None
        return OutputPipe(
            _take_over(getattr(self._preloader.process, name)),
            b"" if self._is_unmarked else b"[preload] ",
            self._consoles[name],
            notes=self._startup_notes(self._plan.first_rank),
            on_unread=self._end_unread,
        )

    def _take_preloader_answer(self) -> None:
        """Starts the workers when the modules are imported, or ends if that has failed."""
        if self._preloader is None:  # its end was noticed first
            return
        self._selector.unregister(self._preloader)
        self._preloader.take_answer()
        if self._preloader.failure:
            raise self._cannot_preload(self._preloader.failure)
        if self._preloader.is_ready and self._interrupted_by is None:
            self._started_s = time.monotonic()
            self._start()

    def _cannot_preload(self, reason: str) -> CannotStartError:
        self._empty(self._preloader_pipes)  # the traceback
        return CannotStartError(f"--preload {','.join(self._plan.preload)}: {reason}")

    def _note_preloader_exit(self, preloader: Preloader, returncode: int) -> None:
        preloader.take_answer()
        self._dismiss_preloader()
        if self._interrupted_by is not None:
            return
        how = f"exit code {returncode}" if returncode >= 0 else signal_name(-returncode)
        evidence = self._memory_watch.evidence() if returncode == -signal.SIGKILL else ""
        reason = f"ended by {how}{f'; {evidence}' if evidence else ''}"
        if not self._workers:
            raise self._cannot_preload(preloader.failure or f"the process that imports {reason}")
        self._say_it_is_lost(preloader, reason)

    def _say_it_is_lost(self, preloader: Preloader, reason: str) -> None:
        self._say(
            f"coarse run: the process with the modules of --preload (pid {preloader.pid}) {reason}; workers start "
            "without it from now on\n"
        )

    def _dismiss_preloader(self) -> None:
        """Lets it end: no worker is to be forked any more. Idempotent."""
        preloader, self._preloader = self._preloader, None
        if preloader is not None:
            with suppress(KeyError):  # it has answered
                self._selector.unregister(preloader)
            preloader.close()

    def _fork(
        self, local_rank: int, environment: Mapping[str, str], *, has_pipes: bool
    ) -> ForkedWorker | None:
        """Forks a worker; returns None if there is nothing to fork."""
        if self._preloader is None:
            return None
        try:
            return self._preloader.fork(environment, reads_stdin=local_rank == 0, has_pipes=has_pipes)
        except PreloaderLostError as error:
            self._say_it_is_lost(self._preloader, str(error))
            self._preloader.kill()
            self._dismiss_preloader()
            return None

    def _spared(self) -> list[int]:
        """Processes that outlive an attempt which is followed by another one."""
        preloaders = [] if self._preloader is None else [self._preloader.pid]
        return [*persistent_pids(self._plan.job), *preloaders]

    @contextmanager
    def _signals_watched(self) -> Iterator[None]:
        """Turns signals into readable bytes, so that one wait covers signals and pipes."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in {*FORWARDED_SIGNALS, *NOTIFYING_SIGNALS, signal.SIGCHLD}:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _do_nothing)
        self._selector.register(reader, selectors.EVENT_READ, partial(self._on_signals, reader))
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            self._selector.close()
            os.close(reader)
            os.close(writer)

    def _wait(self) -> None:
        """Waits for one event, or for the next due step, and handles it."""
        next_step_s = min((when for when, _ in self._steps), default=None)
        timeout_s = None if next_step_s is None else max(0.0, next_step_s - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            key.data()
        now = time.monotonic()
        for step in [step for step in self._steps if step[0] <= now]:
            self._steps.remove(step)
            step[1]()

    def _pump(self, pipe: OutputPipe) -> None:
        fd = pipe.fd
        pipe.pump()
        if not pipe.is_open:
            self._selector.unregister(fd)

    def _take_notes(self) -> None:
        notes = self._notes_pipe.read()
        for note in notes:
            if isinstance(note.get("invitation"), dict):
                self._invitation = note["invitation"]
            if isinstance(note.get("entered"), int):
                self._note_entry(note["entered"])
            if isinstance(note.get("over"), int) and self._members_of(note["over"]):
                self._is_session_over = True
            if isinstance(note.get("is_leaving"), int):
                self._confirm_end(note["is_leaving"])
            if isinstance(note.get("left"), int) and isinstance(note.get("step"), int):
                self._note_departure(note["left"], note["step"], is_asked=note.get("is_asked") is True)
        for line in self._notes.take(notes):
            self._say(f"coarse run: {line}\n")

    def _on_signals(self, reader: int) -> None:
        numbers = set(os.read(reader, 4096))
        for number in sorted(numbers & set(FORWARDED_SIGNALS)):
            self._interrupt(signal.Signals(number))
        for number in sorted(numbers & set(NOTIFYING_SIGNALS)):
            signal_all(self._running, signal.Signals(number))
        self._reap()

    def _reap(self) -> int:
        """Reaps every ended child and returns their number; the only place in this process that reaps."""
        count = 0
        while self._has_children:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                self._has_children = False
                break
            if ended is None:
                break
            returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            self._note_exit(ended.si_pid, returncode)
            count += 1
        return count

    def _note_exit(self, pid: int, returncode: int) -> None:
        self._take_notes()  # a new worker may have said that it takes part
        if self._preloader is not None and pid == self._preloader.pid:
            return self._note_preloader_exit(self._preloader, returncode)
        worker = self._running.pop(pid, None)
        if worker is None:  # an orphaned child of a worker
            return
        worker.process.returncode = returncode
        worker.ended_s = time.monotonic()
        if returncode == -signal.SIGKILL and not worker.was_stopped:
            worker.evidence = self._memory_watch.evidence()
        if worker.is_entering:
            return self._note_failed_entry(worker)
        if worker.left_at is not None:
            return self._note_end_after_departure(worker)
        self._ended.append(worker)
        if returncode == 0:
            self._dismiss_newcomers()
        is_first = returncode != 0 and not self._is_failing and self._interrupted_by is None
        if is_first and not self._goes_on_without(worker):
            self._begin_to_fail()

    def _begin_to_fail(self) -> None:
        self._is_failing = True
        self._later(REPORT_GRACE_S, self._terminate_silent_workers)
        self._later(REPORT_GRACE_S + TEARDOWN_GRACE_S, self._terminate_workers)
        self._later(REPORT_GRACE_S + TERMINATE_GRACE_S, self._kill_all)

    def _goes_on_without(self, worker: _Worker) -> bool:
        """Whether enough workers still run after this one has failed, and none has finished; says so."""
        num_finished = len(self._ended) - len(self._lost) - 1
        are_enough = 0 < self._plan.least_here <= self._num_members
        if not are_enough or num_finished or self._is_session_over:
            return False
        self._lost.append(worker)
        self._say_who_goes_on(str(worker.exit()), worker.ended_s)
        self._replace_later(worker.rank)
        return True

    @property
    def _num_members(self) -> int:
        """Running workers that take part in the training."""
        return sum(not each.is_entering and each.left_at is None for each in self._running.values())

    def _say_who_goes_on(self, change: str, changed_s: float) -> None:
        left, enough = self._num_members, self._plan.min_workers
        others = f"{left} on this node" if self._plan.has_other_nodes else str(left)
        follows = (
            f"the other {others} go on" if left >= self._plan.least_here else f"{others} are left, too few"
        )
        self._say(
            f"coarse run: {change}, {changed_s - self._started_s:.1f} s after the start; {follows} "
            f"(--min-workers {enough})\n"
        )

    # ---- workers that leave after SIGTERM, while the others go on ----

    def _members_of(self, rank: int) -> list[_Worker]:
        """The running worker of this rank that takes part in the training, if there is one."""
        return [each for each in self._running.values() if each.rank == rank and not each.is_entering]

    def _confirm_end(self, rank: int) -> None:
        """Sends SIGTERM again to a worker that would finish its step first, if all workers are to end."""
        stopped = [each for each in self._members_of(rank) if each.was_stopped]
        signal_all([each.process.pid for each in stopped], signal.SIGTERM)

    def _note_departure(self, rank: int, step: int, *, is_asked: bool) -> None:
        for worker in self._members_of(rank):
            worker.left_at = step
            self._left.append(worker)
            asked = " (SIGTERM)" if is_asked else ""
            departure = f"worker {rank} (pid {worker.process.pid}) left at step {step}{asked}"
            self._say_who_goes_on(departure, time.monotonic())
            if self._num_members < self._plan.least_here and not self._is_over:
                self._begin_to_fail()

    def _note_end_after_departure(self, worker: _Worker) -> None:
        if worker.process.returncode and not worker.was_stopped:
            self._say(f"coarse run: {worker.exit()}, after it had left\n")

    # ---- new workers in place of lost ones ----

    def _replace_later(self, rank: int) -> None:
        """Starts a new worker in the place of a lost one after a while, if restarts are left."""
        if not self._plan.replaces_workers:
            return
        if self._num_restarts + self._num_replacements >= self._plan.max_restarts:
            self._say(
                f"coarse run: worker {rank} is not replaced: --max-restarts {self._plan.max_restarts}\n"
            )
            return
        self._num_replacements += 1
        self._to_replace.add(rank)
        self._later(self._replacement_delay_s, partial(self._replace, rank))

    def _replace(self, rank: int) -> None:
        self._to_replace.discard(rank)
        if self._is_over:
            return
        if self._invitation is None:
            self._say(
                f"coarse run: worker {rank} is not replaced: the job has no session that takes new workers\n"
            )
            return
        try:
            worker = self._start_newcomer(rank)
        except OSError as error:
            self._say(f"coarse run: no new worker {rank} can be started: {error}\n")
            return
        self._say(
            f"coarse run: a new worker {rank} (pid {worker.process.pid}) starts; {self._num_replacements} of "
            f"{self._plan.max_restarts} restart(s)\n"
        )

    def _start_newcomer(self, rank: int) -> _Worker:
        local_rank = rank - self._plan.first_rank
        invited = {**self._environment_of(local_rank), "COARSE_INVITATION": json.dumps(self._invitation)}
        worker = self._spawn(local_rank, invited)
        worker.is_entering = True
        self._add(worker)
        return worker

    @property
    def _is_over(self) -> bool:
        """Whether it is too late for new workers."""
        is_ending = self._is_failing or self._interrupted_by is not None
        return is_ending or self._has_finished or not (self._running or self._is_preloading)

    @property
    def _has_finished(self) -> bool:
        """Whether some worker has done its work."""
        return any(worker.process.returncode == 0 for worker in self._ended)

    def _note_entry(self, rank: int) -> None:
        for worker in self._running.values():
            if worker.rank == rank and worker.is_entering:
                worker.is_entering = False
                self._replacement_delay_s = 0.0
                (self._replaced if worker.request is None else self._joined).append(rank)
                if worker.request is not None:
                    worker.request.tell_end(rank)
                self._say(
                    f"coarse run: worker {rank} (pid {worker.process.pid}) takes part in the training\n"
                )

    def _note_failed_entry(self, worker: _Worker) -> None:
        """Tries again, after twice the time, when a replacement has ended before it took part."""
        if worker.request is not None:
            how = "the others have finished or end" if self._is_over else str(worker.exit())
            worker.request.tell_end(worker.rank, how)
        if worker.was_stopped or self._is_over:
            return
        self._say(f"coarse run: {worker.exit()}, before it took part in the training\n")
        if worker.request is not None:
            return
        self._replacement_delay_s = min(max(_FIRST_DELAY_S, 2 * self._replacement_delay_s), _LONGEST_DELAY_S)
        self._replace_later(worker.rank)

    # ---- workers that join in vacant places ----

    def _take_join_request(self, request: JoinRequest) -> None:
        """Starts as many workers as a request asks for, in the lowest vacant places, or refuses it."""
        vacant = self._vacant_ranks()
        if reason := self._cannot_take(request.num_workers, len(vacant)):
            return request.refuse(reason)
        for rank in vacant[: request.num_workers]:
            try:
                worker = self._start_newcomer(rank)
            except OSError as error:
                request.tell_end(rank, f"worker {rank} cannot be started: {error}")
                continue
            worker.request = request
            request.tell_start(rank, worker.process.pid)
            self._say(f"coarse run: worker {rank} (pid {worker.process.pid}) starts, to join the training\n")

    def _vacant_ranks(self) -> list[int]:
        taken = {worker.rank for worker in self._running.values()} | self._to_replace
        first = self._plan.first_rank
        return [rank for rank in range(first, first + len(self._plan.environments)) if rank not in taken]

    def _cannot_take(self, num_workers: int, num_vacant: int) -> str:
        """Why workers cannot join now, and what to do; "" if they can."""
        num_places = len(self._plan.environments)
        if self._is_over:
            return "its workers end"
        if self._invitation is None:
            return (
                "its workers have no session yet. Try again when they train; a script that wraps no model and makes "
                "no session takes no workers"
            )
        if num_workers <= num_vacant:
            return ""
        found = f"{num_vacant} of its {num_places} places are vacant"
        return (
            f"{found if num_vacant else f'all {num_places} places are taken'}, and {num_workers} worker(s) are to "
            "join. Ask for fewer (-n), or start the job with a larger --max-workers"
        )

    def _dismiss_newcomers(self) -> None:
        """Ends new workers that have not taken part when the others finish: nothing is left for them to do."""
        entering = [each for each in self._running.values() if each.is_entering and not each.was_stopped]
        if entering:
            _stop(entering, signal.SIGTERM)
            pids = [each.process.pid for each in entering]
            self._later(TERMINATE_GRACE_S, lambda: self._kill(pids))

    def _kill(self, pids: Sequence[int]) -> None:
        signal_all([pid for pid in pids if pid in self._running], signal.SIGKILL)

    def _follow_last_exit(self) -> None:
        """Runs after the last worker's end: restarts all, or gives remaining child processes time to end."""
        self._steps = []
        if self._is_to_restart:
            self._restart()
            return
        self._is_ending = True
        self._dismiss_preloader()
        self._later(LEFTOVER_GRACE_S, self._terminate_leftovers)
        self._later(2 * LEFTOVER_GRACE_S, self._kill_all)

    @property
    def _is_to_restart(self) -> bool:
        is_failing = self._is_failing and self._interrupted_by is None
        has_failed = any(worker.process.returncode != 0 for worker in self._ended)  # not if all have left
        return (
            is_failing
            and has_failed
            and self._num_restarts + self._num_replacements < self._plan.max_restarts
        )

    def _restart(self) -> None:
        """Restarts all workers after the last one has ended. Kept memory devices survive."""
        self._num_restarts += 1
        failure = first_failure([worker.exit() for worker in self._ended])
        restart = f"{failure}; restart {self._num_restarts} of {self._plan.max_restarts}"
        self._plan.tell(FAULT, restart)
        self._say(f"coarse run: {restart}\n")
        sweep(spared=self._spared(), reap=self._reap)
        self._is_failing = False
        self._is_session_over = False
        self._lost, self._left = [], []
        self._to_replace.clear()
        self._invitation = None
        self._replacement_delay_s = 0.0
        self._started_s = time.monotonic()
        self._ended = []
        self._has_children = True
        self._start()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._steps.append((time.monotonic() + delay_s, action))

    def _end_unread(self, error: OSError) -> None:
        """Ends the job as a signal does, because the workers' output cannot be written."""
        if self._unread is None and self._interrupted_by is None and not self._is_failing:
            self._unread = error
            self._interrupt(signal.SIGPIPE, passed_on=signal.SIGTERM)  # Python ignores SIGPIPE

    def _interrupt(self, number: signal.Signals, *, passed_on: signal.Signals | None = None) -> None:
        if self._interrupted_by is not None:
            self._kill_all()
            return
        self._interrupted_by = number
        is_orphaned = os.getppid() != self._launcher
        self._later(ORPHANED_GRACE_S if is_orphaned else self._plan.shutdown_timeout_s, self._kill_all)
        if self._is_preloading and self._preloader is not None:
            self._preloader.kill()
        _stop(self._running.values(), passed_on or number)

    def _terminate_silent_workers(self) -> None:
        running = self._running.values()
        _stop([worker for worker in running if not reports_own_error(worker.tail.text)], signal.SIGTERM)

    def _terminate_workers(self) -> None:
        late = [worker for worker in self._running.values() if not worker.was_stopped]
        for worker in late:
            worker.had_failed = reports_own_error(worker.tail.text)
        _stop(late, signal.SIGTERM)

    def _terminate_leftovers(self) -> None:
        signal_all(descendants(os.getpid()), signal.SIGTERM)

    def _kill_all(self) -> None:
        """Kills until no process remains, except memory devices that are kept for a restart."""
        if not self._is_to_restart:
            self._dismiss_preloader()
        spared = self._spared() if self._is_to_restart else ()
        signal_all(descendants(os.getpid(), spared=spared), signal.SIGKILL)
        self._later(_KILL_INTERVAL_S, self._kill_all)

    def _drain(self) -> None:
        self._empty(self._preloader_pipes)
        for worker in self._workers:
            self._empty(worker.pipes)

    def _empty(self, pipes: Collection[OutputPipe]) -> None:
        for pipe in pipes:
            while pipe.is_open and pipe.pump():
                continue
            pipe.close()

    def _verdict(self) -> int:
        exits = [worker.exit() for worker in self._ended]
        lost = [worker.exit() for worker in self._lost]
        # Without the lost ones the job has ended well, unless another one has failed.
        failure = first_failure(exits if self._is_failing else [each for each in exits if each not in lost])
        failed = [f"worker {each.rank} lost" for each in lost] if not self._is_failing else []
        failed += [f"worker {rank} replaced" for rank in self._replaced]
        failed += [] if failure is None or failure.was_stopped else [f"worker {failure.rank} failed"]
        changes = [f"worker {rank} joined" for rank in self._joined]
        changes += [f"worker {each.rank} left at step {each.left_at}" for each in self._left]
        if summary := self._notes.summary(self._num_restarts, failed, changes):
            self._plan.tell(JOB, summary)
            self._say(f"coarse run: {summary}\n")
        if self._interrupted_by is not None and (failure is None or failure.was_stopped):
            self._plan.tell(JOB, f"{self._why_interrupted()}; no worker is left")
            self._say(f"coarse run: {self._why_interrupted()}; no worker is left\n")
            return 128 + self._interrupted_by
        if failure is None and self._left and not self._has_finished:
            self._plan.tell(JOB, "all workers have left")
            self._say("coarse run: all workers have left before the end of the job\n")
            return 128 + signal.SIGTERM
        if failure is None:
            return 0
        self._plan.tell(FAULT, headline(failure, exits))
        self._say(report(failure, exits))
        return failure.exit_code

    def _why_interrupted(self) -> str:
        assert self._interrupted_by is not None
        if self._unread is None:
            return f"stopped by {signal_name(self._interrupted_by)}"
        if isinstance(self._unread, BrokenPipeError):
            return "stopped, because nothing reads the output any more"
        return f"stopped, because the output cannot be written: {self._unread.strerror}"

    def _say(self, text: str) -> None:
        console = self._consoles["stderr"]
        with suppress(OSError):  # the terminal may be gone
            console.write(console.render(self, b"", Piece(text.encode(errors="replace"))))


def _stop(workers: Collection[_Worker], number: signal.Signals) -> None:
    for worker in workers:
        worker.was_stopped = True
    signal_all([worker.process.pid for worker in workers], number)


def _do_nothing(number: int, frame: object) -> None:
    """A handler that does nothing, so that the signal reaches the wakeup descriptor."""


def _take_over(stream: IO[bytes]) -> int:
    """A descriptor of its own for a stream, which is closed; reading it does not block."""
    fd = os.dup(stream.fileno())
    stream.close()
    os.set_blocking(fd, False)
    return fd


def _open_log(log_dir: Path | None, rank: int, *, is_new: bool) -> int | None:
    if log_dir is None:
        return None
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_new else 0)
    return os.open(log_dir / f"worker-{rank}.log", flags, 0o666)

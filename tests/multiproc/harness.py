"""Runs worker functions in real processes, follows them, kills them on a test's request, and cleans up.

A worker is a fork of the test process that runs one function. The function receives a `Worker`, its end of the
harness; its result or error returns as JSON. Memory devices are separate processes that the session starts, as for
users or as forks of a process with their modules (preloaded_devices.py). No sleeps and no fixed addresses: tests and
workers signal each other when they are ready, and every wait has a limit after which everything is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from coarse.env import WorkerIdentity
from coarse.session import Session
from coarse.settings import Settings
from coarse.store import DirectoryStore

if TYPE_CHECKING:  # scripts of jobs import this module, and have no other folder of tests on their path
    from preloaded_devices import DeviceTemplate

LIMIT_S = 90.0
"""Time limit for everything that is not itself under test."""

PROMPT_S = 5.0
"""Limit for survivors to detect a death while other tests use the CPUs; otherwise a fraction of a second."""

LIMIT_OF_DEVICES_S = 30.0
"""Limit for memory devices to end after the last worker has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a worker ended.

    Args:
        value: Result of its function, after conversion to JSON and back.
        error: Name of the exception's type, or "" without an exception.
        message: The exception's text.
        details: The exception's traceback.
        ended_s: When the function ended, by time.monotonic(), which all processes share.
        exit_code: As in Popen: negative for a signal's number.
    """

    value: Any = None
    error: str = ""
    message: str = ""
    details: str = ""
    ended_s: float = 0.0
    exit_code: int = 0


class Worker:
    """A worker's end of the harness."""

    def __init__(self, rank: int, world_size: int, directory: Path, channel: _JsonChannel) -> None:
        self.rank = rank
        self.world_size = world_size
        self.directory = directory
        self._channel = channel

    @property
    def identity(self) -> WorkerIdentity:
        return WorkerIdentity(
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.rank,
            local_world_size=self.world_size,
        )

    def store(self, name: str = "store") -> DirectoryStore:
        """The rendezvous store of a session; each session of a job uses its own."""
        path = self.directory / name
        path.mkdir(mode=0o700, exist_ok=True)
        return DirectoryStore(path)

    def join(self, store: str = "store", **settings: Any) -> Session:
        """Joins a session of all workers of this job."""
        return Session.join(
            identity=self.identity,
            store=self.store(store),
            settings=Settings(**{"timeout_s": LIMIT_S, **settings}),
        )

    def tell(self, value: Any = None) -> None:
        """Sends a value to the test."""
        self._channel.send(value)

    def hear(self) -> Any:
        """Waits for a value from the test."""
        return self._channel.receive()


class RunningWorker:
    """The test's end of a worker process."""

    def __init__(self, rank: int, pid: int, channel: _JsonChannel) -> None:
        self.rank = rank
        self.pid = pid
        self._channel = channel
        self._pidfd = os.pidfd_open(pid)
        self._outcome: Outcome | None = None

    def tell(self, value: Any = None) -> None:
        self._channel.send(value)

    def hear(self) -> Any:
        """Waits for the worker's tell().

        Raises:
            AssertionError: If its function ended instead; includes its traceback.
        """
        said = self._channel.receive()
        assert not (isinstance(said, dict) and "ended_s" in said), f"worker {self.rank} ended: {said}"
        return said

    def signal(self, number: int) -> float:
        """Sends a signal; returns when, by time.monotonic()."""
        sent_s = time.monotonic()
        signal.pidfd_send_signal(self._pidfd, number)
        return sent_s

    def stop(self) -> float:
        """Stops all threads of the worker; returns the time of the request."""
        sent_s = self.signal(signal.SIGSTOP)
        os.waitid(os.P_PIDFD, self._pidfd, os.WSTOPPED)
        return sent_s

    def kill(self) -> float:
        """Kills the worker; returns when, by time.monotonic()."""
        return self.signal(signal.SIGKILL)

    def finish(self) -> Outcome:
        """Waits for the end of the worker's function and process."""
        if self._outcome is None:
            said = self._last_words()
            _await_end(self._pidfd, LIMIT_S, f"worker {self.rank}")
            _, status = os.waitpid(self.pid, 0)
            self._outcome = Outcome(**said, exit_code=os.waitstatus_to_exitcode(status))
        return self._outcome

    def _last_words(self) -> dict[str, Any]:
        """How the worker's function ended; empty if the process ended first."""
        try:
            while True:
                said = self._channel.receive()
                if isinstance(said, dict) and "ended_s" in said:
                    return said
        except EOFError:
            return {}

    def close(self) -> None:
        """Ends the process in any state."""
        if self._outcome is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        self._channel.close()


class Job:
    """The workers of one test, and the files and processes that they may leave behind.

    Args:
        template: What memory devices are forks of; None to start them as for users.
    """

    def __init__(self, template: DeviceTemplate | None = None) -> None:
        self._template = template
        # Socket paths must be short: pytest's temporary directories are too long.
        self.directory = Path(tempfile.mkdtemp(prefix="coarse-test-"))
        self.temporary = self.directory / "tmp"
        self.temporary.mkdir(mode=0o700)
        self._workers: list[RunningWorker] = []

    def start(self, world_size: int, function: Callable[[Worker], Any]) -> list[RunningWorker]:
        """Starts workers 0 to `world_size` - 1 with `function`."""
        return [self.start_worker(rank, world_size, function) for rank in range(world_size)]

    def start_worker(self, rank: int, world_size: int, function: Callable[[Worker], Any]) -> RunningWorker:
        """Starts one worker."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for other in self._workers:
                other._channel.close()
            self._be_worker(Worker(rank, world_size, self.directory, _JsonChannel(theirs)), function)
        theirs.close()
        worker = RunningWorker(rank, pid, _JsonChannel(ours))
        self._workers.append(worker)
        return worker

    def run(self, world_size: int, function: Callable[[Worker], Any]) -> list[Any]:
        """Runs `function` on all workers; returns its results by rank.

        Raises:
            AssertionError: If one failed; includes all tracebacks.
        """
        outcomes = self.outcomes(world_size, function)
        failed = [
            f"worker {rank}: {o.details or o}" for rank, o in enumerate(outcomes) if o.error or o.exit_code
        ]
        assert not failed, "\n".join(failed)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, world_size: int, function: Callable[[Worker], Any]) -> list[Outcome]:
        """Runs `function` on all workers; returns how they ended, by rank."""
        return [worker.finish() for worker in self.start(world_size, function)]

    def device_pids(self) -> list[int]:
        """Memory devices of this job that have not ended."""
        mark = f"TMPDIR={self.temporary}".encode()
        return [
            pid for pid in _processes() if _is_device(pid) and mark in _proc_file(pid, "environ").split(b"\0")
        ]

    def signal_device(self, pid: int, number: int) -> float:
        """Sends a signal to a memory device of this job; returns when, by time.monotonic()."""
        assert pid in self.device_pids()
        sent_s = time.monotonic()
        os.kill(pid, number)
        return sent_s

    def kill_device(self, pid: int) -> float:
        """Kills a memory device of this job; returns when, by time.monotonic()."""
        return self.signal_device(pid, signal.SIGKILL)

    def stop_device(self, pid: int) -> float:
        """Stops all threads of a memory device of this job; returns the time of the request."""
        sent_s = self.signal_device(pid, signal.SIGSTOP)
        while not _is_stopped(pid):
            assert time.monotonic() < sent_s + LIMIT_S
            os.sched_yield()
        return sent_s

    def await_end(self, pid: int) -> None:
        """Waits until a process has ended."""
        assert _ends(pid, LIMIT_S)

    def check_nothing_left(self) -> None:
        """Kills all remaining processes, and fails if these include any besides the test's workers.

        Raises:
            AssertionError: If memory devices or their directories outlive the workers.
        """
        for worker in self._workers:
            worker.close()
        try:
            left = [pid for pid in self.device_pids() if not _ends(pid, LIMIT_OF_DEVICES_S)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            assert not left, f"memory devices {left} outlived their workers by {LIMIT_OF_DEVICES_S} s"
            directories = sorted(path.name for path in self.temporary.iterdir())
            assert not directories, f"{directories} were left in the temporary directory"
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _be_worker(self, worker: Worker, function: Callable[[Worker], Any]) -> NoReturn:
        code = 1
        try:
            os.environ["TMPDIR"] = str(self.temporary)
            tempfile.tempdir = None
            if self._template is not None:
                self._template.use()
            outcome = _outcome_of(function, worker)
            worker._channel.send(outcome)
            code = 1 if outcome["error"] else 0
        except BaseException:
            traceback.print_exc()
        finally:
            # The worker must not run the test process's clean-up.
            os._exit(code)


@contextlib.contextmanager
def job_of_test(template: DeviceTemplate | None = None) -> Iterator[Job]:
    """A Job; checks that it leaves no processes, directories or descriptors of the test process behind."""
    descriptors = open_descriptors()
    job = Job(template)
    try:
        yield job
    finally:
        job.check_nothing_left()
    # The garbage collector may have closed descriptors of earlier tests meanwhile.
    assert open_descriptors() <= descriptors, what_is_open()


def open_descriptors(pid: int | str = "self") -> int:
    """Number of open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def what_is_open() -> list[str]:
    """The targets of this process's descriptors."""
    return sorted(os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))


def _outcome_of(function: Callable[[Worker], Any], worker: Worker) -> dict[str, Any]:
    try:
        return {"value": function(worker), "ended_s": time.monotonic(), "error": ""}
    except BaseException as error:
        ended_s = time.monotonic()
        details = traceback.format_exc()
        return {"error": type(error).__name__, "message": str(error), "details": details, "ended_s": ended_s}


class _JsonChannel:
    """JSON values, one per line, over a stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    def send(self, value: Any) -> None:
        self._socket.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> Any:
        """The next value.

        Raises:
            EOFError: If the other end has closed.
            TimeoutError: If no value arrived within LIMIT_S.
        """
        deadline = time.monotonic() + LIMIT_S
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._socket.recv(65536)
            if not data:
                raise EOFError("the other end of the harness is gone")
            self._buffer += data
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        self._socket.settimeout(None)
        return json.loads(line)

    def close(self) -> None:
        self._socket.close()


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _proc_file(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _is_stopped(pid: int) -> bool:
    return all(
        _proc_file(pid, f"task/{thread}/stat").rpartition(b")")[2].split()[0] == b"T"
        for thread in os.listdir(f"/proc/{pid}/task")
    )


def _is_device(pid: int) -> bool:
    return b"\0coarse\0device\0" in _proc_file(pid, "cmdline")


def _ends(pid: int, limit_s: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(_poll(pidfd, limit_s))
    finally:
        os.close(pidfd)


def _await_end(pidfd: int, limit_s: float, who: str) -> None:
    assert _poll(pidfd, limit_s), f"{who} did not end within {limit_s} s"


def _poll(fd: int, limit_s: float) -> list[tuple[int, int]]:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return poll.poll(limit_s * 1000)

"""The driver's side: long-lived worker processes of one system, which never outlive the driver."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeAlias

import psutil

from coarse.bench.harness import mpi_segments
from coarse.bench.harness.commands import BenchError, MakeCommands, WorkerJob, receive, send
from coarse.bench.harness.control_group import ControlGroup
from coarse.bench.harness.launchers import RANK_FROM_LAUNCHER, launch
from coarse.env import own_process_environment
from coarse.errors import CoarseError, SyncTimeoutError, WorkerLostError
from coarse.process.scratch import Scratch
from coarse.security.local_sockets import short_address

START_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 600.0
"""Time limit for commands whose duration does not depend on the benchmark's size."""
_TIMEOUT_PER_ITEM_S = 60.0
_CLOSE_TIMEOUT_S = 15.0
_INTERRUPTED_TIMEOUT_S = 3.0
_TERMINATE_TIMEOUT_S = 3.0
_POLL_INTERVAL_S = 0.2
_EXIT_CODE_TIMEOUT_S = 0.5
_EXIT_CODE_INTERVAL_S = 0.01
_STDERR_TAIL_LINES = 20


def time_for(num_items: int, *, stretch: float = 1.0) -> float:
    """Time limit in seconds for `num_items` steps or saves together, generous enough to end only those that hang.

    Args:
        num_items: Number of steps or saves.
        stretch: Allowed factor over the time on a current machine.
    """
    return COMMAND_TIMEOUT_S + num_items * _TIMEOUT_PER_ITEM_S * max(1.0, stretch)


Progress: TypeAlias = Callable[[str], None]
"""Called with a description before each piece of work."""


class WorkerPool:
    """The worker processes of one system, from the beginning of its context to the end; one thread at a time.

    Every wait is bounded and watches the processes. Workers have separate process groups, so Ctrl-C reaches only the
    driver, which then ends them. If the driver is killed, they end by themselves.

    Entering the context starts the workers and waits until every one is set up. It raises:
        WorkerLostError: If one dies; the message ends with its standard error.
        BenchError: If one reports an error.
        SyncTimeoutError: If they are not all set up within `start_timeout_s`.

    Args:
        system: Name of the system; launchers.launch() starts its processes.
        make_commands: Creates the commands of each worker, in its process; importable.
        num_workers: Number of worker processes.
        options: Settings of the system, for its commands; JSON values.
        threads: OMP_NUM_THREADS of each worker.
        group: Control group of all processes; None for the driver's.
        start_timeout_s: Time limit for the start.
    """

    def __init__(
        self,
        system: str,
        make_commands: MakeCommands,
        num_workers: int,
        options: dict[str, Any] | None = None,
        *,
        threads: int = 1,
        group: ControlGroup | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.system = system
        self._make_commands = make_commands
        self._num_workers = num_workers
        self._options = options or {}
        self._threads = threads
        self._group = group
        self._start_timeout_s = start_timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._scratch: Scratch | None = None
        self._has_ranks = False  # connections are in the order of ranks
        self._healthy = False

    def __enter__(self) -> WorkerPool:
        try:
            self._start()
        except BaseException:
            self.close(_INTERRUPTED_TIMEOUT_S)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_CLOSE_TIMEOUT_S if error is None else _INTERRUPTED_TIMEOUT_S)

    def ask(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S, **arguments: Any) -> list[Any]:
        """Sends one command to every worker and returns their results, by rank.

        Raises:
            WorkerLostError: If one dies.
            BenchError: If one reports an error.
            SyncTimeoutError: If one does not answer within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        healthy, self._healthy = self._healthy, False
        for rank, connection in enumerate(self._connections):
            try:
                send(connection, {"do": command, "with": arguments})
            except OSError:
                raise self._lost(f"worker {rank}", command) from None
        answers = self._receive_all(command, deadline)
        self._healthy = healthy
        return [answer["result"] for answer in answers]

    def descendants(self) -> list[psutil.Process]:
        """All live processes of the system: launchers, workers, memory devices."""
        found: dict[int, psutil.Process] = {}
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(process.pid)
                for each in (root, *root.children(recursive=True)):
                    found[each.pid] = each
        return list(found.values())

    def close(self, leave_timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Ends every process, in order unless a command is unanswered, and removes their leftover files."""
        if self._scratch is None:
            return
        try:
            if self._healthy:
                self._leave(leave_timeout_s)
        finally:
            self._kill_all()
            for connection in self._connections:
                connection.close()
            self._scratch.remove()
            self._processes, self._connections, self._scratch = [], [], None

    def _start(self) -> None:
        self._scratch = Scratch("bench")
        socket_path = os.fspath(self._scratch.path / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            with short_address(socket_path) as address:
                listener.bind(address)
            listener.listen(self._num_workers)
            self._spawn(socket_path)
            self._accept_all(listener, time.monotonic() + self._start_timeout_s)
        self._healthy = True

    def _spawn(self, socket_path: str) -> None:
        assert self._scratch is not None
        job = WorkerJob(
            system=self.system,
            rank=RANK_FROM_LAUNCHER,
            num_workers=self._num_workers,
            directory=self._scratch.path,
            options=self._options,
        )
        plan = launch(job, self._make_commands, socket_path)
        environment = {
            **own_process_environment(),
            "OMP_NUM_THREADS": str(self._threads),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **plan.environment,
        }
        for index, command in enumerate(plan.commands):
            with (self._scratch.path / f"stderr-{index}").open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        command if self._group is None else self._group.command(command),
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def _accept_all(self, listener: socket.socket, deadline: float) -> None:
        """Waits for all workers' connections, then for their first messages, and sorts them by rank."""
        listener.settimeout(_POLL_INTERVAL_S)
        while len(self._connections) < self._num_workers:
            try:
                self._connections.append(Connection(listener.accept()[0].detach()))
            except TimeoutError:
                self._check_alive("start")
                self._check_deadline(
                    "start", deadline, f"{len(self._connections)} of {self._num_workers} came"
                )
        ranks = [hello["rank"] for hello in self._receive_all("start", deadline)]
        if sorted(ranks) != list(range(self._num_workers)):
            raise BenchError(
                f"{self.system}: {self._num_workers} workers were started, their ranks are {ranks}"
            )
        self._connections = [self._connections[ranks.index(rank)] for rank in range(self._num_workers)]
        self._has_ranks = True

    def _receive_all(self, command: str, deadline: float) -> list[dict[str, Any]]:
        """Receives one message of each worker, in their order; stops at the first error or lost worker."""
        received: dict[int, dict[str, Any]] = {}
        waiting: dict[Any, int] = {each: index for index, each in enumerate(self._connections)}
        while waiting:
            for connection in multiprocessing.connection.wait(list(waiting), _POLL_INTERVAL_S):
                index = waiting.pop(connection)
                received[index] = self._receive_one(index, command)
            if waiting:
                self._check_deadline(command, deadline, f"no answer of workers {sorted(waiting.values())}")
        return [received[index] for index in range(len(self._connections))]

    def _receive_one(self, index: int, command: str) -> dict[str, Any]:
        who = f"worker {index}" if self._has_ranks else "a worker"
        try:
            answer = receive(self._connections[index])
        except EOFError:
            raise self._lost(who, command) from None
        if "error" not in answer:
            return answer
        for process, code in self._exit_codes().items():
            if code < 0:  # errors of the surviving workers are only consequences of this
                raise self._lost(f"process {process}", command)
        raise BenchError(f"{self.system}: {command} failed on {who}: {answer['error']}{self._stderr_tail()}")

    def _check_alive(self, command: str) -> None:
        for index, process in enumerate(self._processes):
            if process.poll() is not None:
                raise self._lost(f"process {index}", command)

    def _check_deadline(self, command: str, deadline: float, state: str) -> None:
        if time.monotonic() > deadline:
            raise SyncTimeoutError(f"{self.system}: {command} took too long; {state}.{self._stderr_tail()}")

    def _lost(self, who: str, command: str) -> WorkerLostError:
        codes = ", ".join(_describe_exit(code) for code in self._exit_codes().values())
        how = f" ({codes})" if codes else ""
        return WorkerLostError(f"{self.system}: {who} died during {command}{how}.{self._stderr_tail()}")

    def _exit_codes(self) -> dict[int, int]:
        """Exit codes of ended processes; EOF and errors may be visible a moment earlier."""
        deadline = time.monotonic() + _EXIT_CODE_TIMEOUT_S
        codes: dict[int, int] = {}
        while not codes and time.monotonic() < deadline:
            polled = {index: process.poll() for index, process in enumerate(self._processes)}
            codes = {index: code for index, code in polled.items() if code is not None}
            time.sleep(_EXIT_CODE_INTERVAL_S)
        return codes

    def _stderr_tail(self) -> str:
        """The last lines of stderr of the system's processes, indented, process by process."""
        assert self._scratch is not None
        tails = []
        for log in sorted(self._scratch.path.glob("stderr-*")):
            lines = log.read_text(errors="replace").splitlines()[-_STDERR_TAIL_LINES:]
            if lines:
                tails.append("\n".join((f"  {log.name.replace('stderr-', 'process ')}:", *lines)))
        return "\n" + "\n".join(tails) if tails else ""

    def _leave(self, timeout_s: float) -> None:
        """Lets workers shut down their system; the caller kills those that do not end in time."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(CoarseError, subprocess.TimeoutExpired):
            self.ask("close", timeout_s=timeout_s)
            for process in self._processes:
                process.wait(max(0.0, deadline - time.monotonic()))

    def _kill_all(self) -> None:
        # Launchers put their children into separate process groups, and a dead launcher's children are no longer
        # descendants of the driver. So all are listed before the first signal.
        everyone = self.descendants()
        segments = mpi_segments.mapped_by(each.pid for each in everyone)
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        _, alive = psutil.wait_procs(everyone, timeout=_TERMINATE_TIMEOUT_S if everyone else 0)
        for each in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        for process in self._processes:
            process.wait()
        mpi_segments.remove(segments)


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

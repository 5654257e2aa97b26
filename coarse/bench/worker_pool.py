"""The driver's side: long-lived worker processes of one system, which never outlive the driver."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

import psutil

from coarse.bench import cleanup
from coarse.bench.adapter import WorkerJob
from coarse.bench.channel import Channel
from coarse.bench.control_group import ControlGroup
from coarse.bench.systems import RANK_FROM_LAUNCHER, launch
from coarse.env import own_process_environment
from coarse.errors import CoarseError, SyncTimeoutError, WorkerLostError
from coarse.local_sockets import short_address
from coarse.scratch import Scratch

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


class BenchError(CoarseError):
    """A benchmark failed: a wrong result, or too little memory."""


class WorkerPool:
    """The worker processes of one system. Context manager; idempotent close(); one thread at a time.

    Every wait is bounded and watches the processes. Workers have separate process groups, so Ctrl-C reaches only the
    driver, which then ends them. If the driver is killed, they end by themselves.

    Args:
        system: A name for systems.launch().
        num_workers: Number of worker processes.
        options: Settings of the system, for its adapter.
        threads: OMP_NUM_THREADS of each worker.
        group: Control group of all processes; None for the driver's.
    """

    def __init__(
        self,
        system: str,
        num_workers: int,
        options: dict[str, Any] | None = None,
        *,
        threads: int = 1,
        group: ControlGroup | None = None,
    ) -> None:
        self.system = system
        self._num_workers = num_workers
        self._options = options or {}
        self._threads = threads
        self._group = group
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._scratch: Scratch | None = None
        self._healthy = False

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts the workers and waits until every one is set up.

        Raises:
            WorkerLostError: If one dies or reports an error; the message ends with its standard error.
            SyncTimeoutError: If they are not all set up within `timeout_s`.
        """
        self._scratch = Scratch("bench")
        socket_path = os.fspath(self._scratch.path / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            with short_address(socket_path) as address:
                listener.bind(address)
            listener.listen(self._num_workers)
            self._spawn(socket_path)
            self._accept_all(listener, time.monotonic() + timeout_s)
        self._healthy = True

    def ask(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S, **arguments: Any) -> list[Any]:
        """Sends one command to every worker and returns their results, by rank.

        Raises:
            WorkerLostError: If one dies.
            BenchError: If one reports an error.
            SyncTimeoutError: If one does not answer within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        healthy, self._healthy = self._healthy, False
        for rank, channel in enumerate(self._channels):
            try:
                channel.send({"do": command, "with": arguments})
            except OSError:
                raise self._lost(f"worker {rank}", command) from None
        answers = self._collect(command, deadline)
        self._healthy = healthy
        return answers

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
            for channel in self._channels:
                channel.close()
            self._scratch.remove()
            self._processes, self._channels, self._scratch = [], [], None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_CLOSE_TIMEOUT_S if error is None else _INTERRUPTED_TIMEOUT_S)

    def _spawn(self, socket_path: str) -> None:
        assert self._scratch is not None
        job = WorkerJob(
            rank=RANK_FROM_LAUNCHER,
            num_workers=self._num_workers,
            directory=self._scratch.path,
            options=self._options,
        )
        plan = launch(self.system, job, socket_path)
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
        while len(self._channels) < self._num_workers:
            try:
                self._channels.append(Channel(listener.accept()[0]))
            except TimeoutError:
                self._check_alive("start")
                self._check_deadline("start", deadline, f"{len(self._channels)} of {self._num_workers} came")
        hellos = self._receive_all("start", deadline)
        ranks = [self._checked("start", hello).get("rank", -1) for hello in hellos]
        if sorted(ranks) != list(range(self._num_workers)):
            raise BenchError(
                f"{self.system}: {self._num_workers} workers were started, their ranks are {ranks}"
            )
        self._channels = [channel for _, channel in sorted(zip(ranks, self._channels, strict=True))]

    def _collect(self, command: str, deadline: float) -> list[Any]:
        answers = self._receive_all(command, deadline)
        return [self._checked(command, answer)["result"] for answer in answers]

    def _receive_all(self, command: str, deadline: float) -> list[dict[str, Any]]:
        """Receives one message from each channel, in channel order; stops at the first error or lost worker."""
        received: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for index, channel in enumerate(self._channels):
                selector.register(channel, selectors.EVENT_READ, index)
            while len(received) < len(self._channels):
                for key, _ in selector.select(_POLL_INTERVAL_S):
                    received[key.data] = self._receive_one(key.data, command)
                    selector.unregister(key.fileobj)
                    self._checked(command, received[key.data])
                missing = sorted(set(range(len(self._channels))) - set(received))
                self._check_deadline(command, deadline, f"no answer of workers {missing}")
        return [received[index] for index in range(len(self._channels))]

    def _receive_one(self, index: int, command: str) -> dict[str, Any]:
        try:
            return self._channels[index].receive()
        except EOFError:
            raise self._lost(f"worker {index}", command) from None

    def _checked(self, command: str, answer: dict[str, Any]) -> dict[str, Any]:
        if "error" not in answer:
            return answer
        codes = self._exit_codes()
        for index, code in codes.items():
            if code < 0:  # errors of the surviving workers are only consequences of this
                raise self._lost(f"process {index}", command)
        raise BenchError(f"{self.system}: {command} failed: {answer['error']}{self._stderr_tail()}")

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
        segments = cleanup.mpi_segments(each.pid for each in everyone)
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        _, alive = psutil.wait_procs(everyone, timeout=_TERMINATE_TIMEOUT_S if everyone else 0)
        for each in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        for process in self._processes:
            process.wait()
        cleanup.remove(segments)


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

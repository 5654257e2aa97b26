"""Processes that stay alive over many scenarios, because importing torch takes seconds.

No fixed ports, no sleeps. Every wait has a deadline; a process that does not answer is killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import preloaded
from preloaded import ForkedProcess
from second_tries import name_exit

START_TIMEOUT_S = 300.0  # includes time for compiling
SCENARIO_TIMEOUT_S = 200.0


class ScenarioError(AssertionError):
    """A scenario failed in a process."""


class ProcessPool:
    """One process for each rank of a job, started at the first scenario.

    A process receives the pool's arguments, a path for the rendezvous, and the number of a pipe for its answers. It
    answers once when it is ready and then to each request, with ("result", value) or ("error", traceback). The
    request None ends it. It can import modules from this file's folder.

    When a scenario fails, all processes are ended, or killed if they do not answer in time. The next scenario starts
    new ones, so that a second try is independent of the first.

    Args:
        name: Name for messages.
        script: The script of each process.
        arguments: Arguments of the script.
        environments: One for each process.
        is_peer: Whether the processes run only a peer's code. Its crashes at exit are not this project's faults.
        has_torch: Whether they begin with PyTorch imported (preloaded.py).
    """

    def __init__(
        self,
        name: str,
        script: Path,
        arguments: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        is_peer: bool = False,
        has_torch: bool = False,
    ) -> None:
        self._name = name
        self._is_peer = is_peer
        self._has_torch = has_torch
        self._script = script
        self._arguments = arguments
        self._environments = environments
        self._processes: list[subprocess.Popen[bytes] | ForkedProcess] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def request(self, what: Any) -> None:
        """Sends the same request to all processes."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send(what)

    def collect(self, ranks: Sequence[int] | None = None) -> list[Any]:
        """Results of the scenario in `ranks`, or in all ranks, by rank.

        Raises:
            ScenarioError: If it raised an error in one of them, or did not end in time.
        """
        replies = self._receive(SCENARIO_TIMEOUT_S, ranks)
        errors = [
            f"{self._name}, rank {rank}: {value}"
            for rank, (kind, value) in replies.items()
            if kind == "error"
        ]
        if errors:
            self.dismiss()
            raise ScenarioError("\n".join([*errors, _told(self._stop(timeout_s=20.0))]))
        return [value for _, value in replies.values()]

    def dismiss(self) -> None:
        """Requests the processes to end, without waiting."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)

    def close(self) -> None:
        """Ends the processes; kills those that do not end by themselves. Idempotent.

        Raises:
            ScenarioError: If one crashed at exit.
        """
        self.dismiss()
        ends = self._stop(timeout_s=20.0)
        if not self._is_peer and any("crashed" in end for end, _ in ends):
            raise ScenarioError(f"{self._name}: {_told(ends)}")

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="coarse-test-")
        for rank, environment in enumerate(self._environments):
            paths = [*filter(None, [environment.get("PYTHONPATH")]), str(Path(__file__).parent)]
            of_rank = {"RANK": str(rank), "WORLD_SIZE": str(len(self._environments))}
            ours, theirs = Pipe()
            whole = {**environment, **of_rank, "PYTHONPATH": os.pathsep.join(paths)}
            self._processes.append(self._start_process(rank, theirs.fileno(), whole))
            theirs.close()
            self._connections.append(ours)
        self._receive(START_TIMEOUT_S)

    def _start_process(
        self, rank: int, pipe: int, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        assert self._directory is not None
        arguments = [*self._arguments, f"{self._directory.name}/store", str(pipe)]
        with self._log(rank).open("wb") as log:
            if self._has_torch:
                return preloaded.start(
                    self._script, arguments, environment, output=log.fileno(), pass_fds=[pipe]
                )
            return subprocess.Popen(
                [sys.executable, str(self._script), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[pipe],
            )

    def _receive(self, timeout_s: float, ranks: Sequence[int] | None = None) -> dict[int, tuple[str, Any]]:
        deadline = time.monotonic() + timeout_s
        replies = {}
        for rank in range(len(self._processes)) if ranks is None else ranks:
            connection = self._connections[rank]
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no answer within {timeout_s:.0f} s")
                replies[rank] = connection.recv()
            except (EOFError, OSError) as error:
                ends = self._stop(timeout_s=0.0)
                raise ScenarioError(f"{self._name}, rank {rank}: {error!r}\n{_told(ends)}") from error
        return replies

    def _stop(self, *, timeout_s: float) -> list[tuple[str, str]]:
        """Ends the processes; returns how each ended, and its last output."""
        deadline = time.monotonic() + timeout_s
        ends = []
        for rank, process in enumerate(self._processes):
            try:
                end = name_exit(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                end = "was killed"
            ends.append((end, self._log(rank).read_text(errors="replace")[-4000:]))
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
        return ends

    def _log(self, rank: int) -> Path:
        assert self._directory is not None
        return Path(self._directory.name, f"rank{rank}.log")


def _told(ends: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"rank {rank} {end}\n{printed}" for rank, (end, printed) in enumerate(ends))

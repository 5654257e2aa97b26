"""Worker processes that stay alive over many scenarios, because importing torch takes seconds.

No fixed ports, no sleeps; every wait has a deadline, and what does not answer is killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

WORLD_SIZE = 2
START_TIMEOUT_S = 200.0
SCENARIO_TIMEOUT_S = 200.0
_HERE = Path(__file__).parent


class ScenarioError(AssertionError):
    """A scenario failed in a worker."""


class WorkerPool:
    """Two workers of one strategy that run scenarios together, on one node or on one each.

    Strategies are "ddp", "coarse", "coarse, own path", where workers reduce everything themselves after the first
    steps, "coarse, stand-in GPU", where gradients take the way of a GPU's (gpu_stand_in.py), and "coarse, stand-in
    GPU that has slots", where memory devices are on it too; ", emulated machine" behind that gives them the links of
    aws-p3. "ddp, cuda" and "coarse, cuda" have the models of both workers on the first GPU.

    `stand_ins` is the folder of libraries that stand in for CUDA's.

    A pool is ended when a scenario fails, and killed when it does not answer in time; the next scenario starts a new
    one, so that a second try has nothing of the first.
    """

    def __init__(self, strategy: str, *, num_nodes: int = 1, stand_ins: Path | None = None) -> None:
        self._strategy = strategy
        self._stand_ins = stand_ins
        self._num_nodes = num_nodes
        self.kept_results: dict[str, list[Any]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def submit(self, scenario: str) -> None:
        """Starts `scenario` on all workers."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send(scenario)

    def collect(self) -> list[Any]:
        """What the scenario returned on each worker, by rank.

        Raises:
            ScenarioError: If it raised on a worker, or did not end in time.
        """
        replies = self._receive(SCENARIO_TIMEOUT_S)
        for rank, reply in enumerate(replies):
            if reply[0] == "error":
                self.close()
                raise ScenarioError(f"{self._strategy} worker {rank}: {reply[3]}")
        return [reply[1] for reply in replies]

    def dismiss(self) -> None:
        """Tells the workers to end, and does not wait for that."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)

    def close(self) -> None:
        """Ends the workers; kills those that do not end by themselves. Idempotent."""
        self.dismiss()
        self._stop(timeout_s=20.0)

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="coarse-test-")
        environment = dict(os.environ, OMP_NUM_THREADS="1", COARSE_TIMEOUT_S="100")
        if self._strategy == "coarse, own path":
            environment["COARSE_DUAL_SYNC"] = "0"
        if self._stand_ins is not None:
            environment["LD_LIBRARY_PATH"] = environment["XDG_CACHE_HOME"] = str(self._stand_ins)
        if self._strategy.startswith("coarse, stand-in GPU that has slots"):
            environment["COARSE_MEMORY_DEVICES"] = "cuda:0,cuda:0"
        if self._strategy.endswith(", emulated machine"):
            environment |= {"COARSE_MACHINE": "aws-p3", "COARSE_TIME_DILATION": "2"}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(_HERE.parents[1]), os.environ.get("PYTHONPATH")])
        )
        for rank in range(WORLD_SIZE):
            ours, theirs = Pipe()
            rendezvous = f"{self._directory.name}/store"
            arguments = [self._strategy, str(rank), str(WORLD_SIZE), rendezvous, str(theirs.fileno())]
            with open(self._log(rank), "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, str(_HERE / "parity_worker.py"), *arguments],
                    env={**environment, "COARSE_NODE": str(rank * self._num_nodes // WORLD_SIZE)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                )
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._receive(START_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        replies = []
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no answer within {timeout_s:.0f} s")
                replies.append(connection.recv())
            except (EOFError, OSError) as error:
                logs = "\n".join(self._log(r).read_text()[-4000:] for r in range(WORLD_SIZE))
                self._stop(timeout_s=0.0)
                raise ScenarioError(f"{self._strategy} worker {rank}: {error!r}\n{logs}") from error
        return replies

    def _stop(self, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _log(self, rank: int) -> Path:
        assert self._directory is not None
        return Path(self._directory.name, f"worker{rank}.log")

"""Processes that are the ranks of a process group, kept alive over many scenarios because torch is slow to import.

No fixed ports, no sleeps; every wait has a deadline, and what does not answer is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0  # the backend may have to be compiled
SCENARIO_TIMEOUT_S = 200.0
_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


class ScenarioError(AssertionError):
    """A scenario failed in a rank."""


def installed_coarse(folder: Path) -> Path:
    """Makes `folder` look, to importlib.metadata, as if this source tree were installed in it."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    information = folder / f"coarse-{project['version']}.dist-info"
    information.mkdir()
    information.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: coarse\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    information.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def environment(site: Path, **variables: str) -> dict[str, str]:
    """What a rank's process is started with."""
    paths = [str(site), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(_ROOT / "build" / "test-cache"),  # compiled backends are kept from run to run
        **variables,
    }


class RankPool:
    """The ranks of one backend, started at the first scenario.

    Args:
        backend: For init_process_group.
        site: For PYTHONPATH.
        variables: More of the environment.
        nodes: The node of each rank, by any name.
    """

    def __init__(
        self, backend: str, site: Path, *, nodes: Sequence[str] = ("", ""), **variables: str
    ) -> None:
        self._backend = backend
        self._environment = environment(site, **variables)
        self._nodes = nodes
        self._world_size = len(nodes)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, scenario: str, *, is_on_one_node: bool = False) -> list[Any]:
        """Runs `scenario` in all ranks; what it returned, by rank.

        Args:
            scenario: Its name.
            is_on_one_node: Whether the ranks are to form one node for its time.

        Raises:
            ScenarioError: If it raised in a rank, or did not end in time.
        """
        self.submit(scenario, is_on_one_node=is_on_one_node)
        return self.collect()

    def submit(self, scenario: str, *, is_on_one_node: bool = False) -> None:
        """Starts `scenario` in all ranks."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((scenario, is_on_one_node))

    def collect(self, ranks: list[int] | None = None) -> list[Any]:
        """What the scenario returned in `ranks`, or in all.

        Raises:
            ScenarioError: As run().
        """
        replies = self._receive(SCENARIO_TIMEOUT_S, ranks)
        for reply in replies:
            if reply[0] == "error":
                raise ScenarioError(f"{self._backend}: {reply[1]}")
        return [reply[1] for reply in replies]

    def close(self) -> None:
        """Ends the ranks; kills those that do not end by themselves. Idempotent."""
        for connection in self._connections:
            try:
                connection.send(None)
            except OSError:
                continue
        self._stop(timeout_s=20.0)

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="coarse-test-")
        for rank in range(self._world_size):
            ours, theirs = Pipe()
            arguments = [self._backend, f"{self._directory.name}/store", str(theirs.fileno())]
            with open(self._log(rank), "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, str(_HERE / "rank_worker.py"), *arguments],
                    env={
                        **self._environment,
                        "RANK": str(rank),
                        "WORLD_SIZE": str(self._world_size),
                        "COARSE_NODE": self._nodes[rank],
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                )
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._receive(START_TIMEOUT_S, None)

    def _receive(self, timeout_s: float, ranks: list[int] | None) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        replies = []
        for rank in range(self._world_size) if ranks is None else ranks:
            connection = self._connections[rank]
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no answer within {timeout_s:.0f} s")
                replies.append(connection.recv())
            except (EOFError, OSError) as error:
                logs = "\n".join(self._log(other).read_text()[-4000:] for other in range(self._world_size))
                self._stop(timeout_s=0.0)
                raise ScenarioError(f"{self._backend}, rank {rank}: {error!r}\n{logs}") from error
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
        return Path(self._directory.name, f"rank{rank}.log")

"""How the systems of `nodes.py` take turns on the nodes of one cell."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from node_plan import Case, Cell, Plan
from node_systems import STEP, SYSTEMS, System
from node_workers import LINK, node_commands

from coarse.bench.harness.worker_pool import WorkerPool
from coarse.bench.timing import iterations_within, slowest_worker
from coarse.errors import CoarseError

_COPY_S = 3.0
_PORT = 29555
_START_TIMEOUT_S = 600.0  # the backend may have to be compiled
_COMMAND_TIMEOUT_S = 1200.0
_LEAST_ITERATIONS, _MOST_ITERATIONS = 2, 200


PoolKey = tuple[str, tuple[tuple[str, str], ...]]
"""Systems with the same one share their processes."""


def _key_of(system: System) -> PoolKey:
    return system.processes, tuple(system.environment.items())


class Pools:
    """Processes of the systems on the nodes of one cell, started when they are first needed; a context manager."""

    def __init__(self, cell: Cell, namespaces: Sequence[str]) -> None:
        self._cell = cell
        self._namespaces = list(namespaces)
        self._running: dict[PoolKey, WorkerPool] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, system: System) -> WorkerPool:
        """The processes that serve a system.

        Raises:
            CoarseError: If they do not start.
        """
        key = _key_of(system)
        if key not in self._running:
            pool = self._make(system)
            self._stack.callback(pool.close)
            self._running[key] = pool.__enter__()
        return self._running[key]

    def drop(self, system: System) -> None:
        """Ends its processes, of which some may be dead; of() will start new ones."""
        if pool := self._running.pop(_key_of(system), None):
            pool.close()

    def _make(self, system: System) -> WorkerPool:
        keys = list(map(_key_of, SYSTEMS.values()))
        options = {
            "namespaces": self._namespaces,
            "workers": self._cell.workers,
            "port": _PORT + keys.index(_key_of(system)),
            "environment": dict(system.environment),
        }
        count = self._cell.num_workers
        return WorkerPool(system.processes, node_commands, count, options, start_timeout_s=_START_TIMEOUT_S)


def measure_link(namespaces: Sequence[str]) -> dict[str, float]:
    """Round trip, and the rate at which every node receives while all nodes send."""
    options = {"namespaces": list(namespaces)}
    with WorkerPool(LINK, node_commands, len(namespaces), options) as pool:
        round_trip_s = statistics.median(pool.ask("round_trip_s"))
        bytes_per_s = min(pool.ask("bytes_per_s", seconds=_COPY_S))
    return {"round_trip_ms": round_trip_s * 1e3, "link_bits_per_s": bytes_per_s * 8}


class Contest:
    """The systems of one case, which take turns. A system that fails is left out from then on, with the reason.

    Args:
        case: The case.
        systems: Names.
        pools: Their processes.
        budget_s: Seconds of each turn, about.
    """

    def __init__(self, case: Case, systems: Sequence[str], pools: Pools, budget_s: float) -> None:
        self._case = case
        self._pools = pools
        self._budget_s = budget_s
        self.rounds_ms: dict[str, list[float]] = {system: [] for system in systems}
        self.failures: dict[str, str] = {}

    def run(self, rounds: int) -> None:
        """Each system's turns, which begin with another system in each round."""
        names = list(self.rounds_ms)
        for index in range(rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                if name not in self.failures:
                    self._try_turn(name)

    def _try_turn(self, name: str) -> None:
        try:
            self.rounds_ms[name].append(self._take_turn(SYSTEMS[name]) * 1e3)
        except CoarseError as error:
            self._pools.drop(SYSTEMS[name])
            self.failures[name] = str(error)
            del self.rounds_ms[name]
            print(f"  {self._case}: {name} failed: {error}", file=sys.stderr, flush=True)

    def _take_turn(self, system: System) -> float:
        """Seconds of the median iteration on the slowest worker, without an uncounted one and the verified one."""
        pool = self._pools.of(system)
        run = self._prepare(pool, system)
        begin_s = time.monotonic()
        self._verify(pool, system)
        count = iterations_within(
            self._budget_s, time.monotonic() - begin_s, at_least=_LEAST_ITERATIONS, at_most=_MOST_ITERATIONS
        )
        seconds = slowest_worker(run(count))
        pool.ask("release_step" if self._is_step else "release", _COMMAND_TIMEOUT_S)
        return float(statistics.median(seconds))

    @property
    def _is_step(self) -> bool:
        return self._case.operation == STEP

    def _prepare(self, pool: WorkerPool, system: System) -> Callable[[int], list[list[float]]]:
        """Allocates what a turn takes; returns what runs some iterations."""
        nbytes = self._case.nbytes
        if self._is_step:
            pool.ask("prepare_step", _COMMAND_TIMEOUT_S, nbytes=nbytes, wrapper=system.wrapper)
        else:
            pool.ask("prepare", _COMMAND_TIMEOUT_S, nbytes=nbytes, dtype="float32")
        command = "run_step" if self._is_step else "run"
        return lambda count: pool.ask(command, _COMMAND_TIMEOUT_S, iterations=count)

    def _verify(self, pool: WorkerPool, system: System) -> None:
        if self._is_step:
            pool.ask("verify_step", _COMMAND_TIMEOUT_S, tolerance=system.tolerance)
        else:
            pool.ask("verify", _COMMAND_TIMEOUT_S)


def compare(case: Case, plan: Plan, pools: Pools, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Runs all systems of a case; returns its record."""
    contest = Contest(case, plan.systems_of(case.operation), pools, plan.budget_s)
    contest.run(plan.rounds)
    figures = {"rounds_ms": contest.rounds_ms, "failures": contest.failures}
    return {"bench": "nodes", **case.as_json(), **conditions, **figures}

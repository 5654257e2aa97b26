"""`coarse bench sync`: all-reduce of one tensor by COARSE, other systems, and at the machine's limit."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from coarse.bench.harness.job_memory import require_memory
from coarse.bench.harness.worker_pool import Progress, WorkerPool
from coarse.bench.sync.systems import LIMIT, sync_commands
from coarse.bench.timing import Timing, iterations_within, slowest_worker
from coarse.machine.memory_name import parse_memory_devices
from coarse.settings import Settings

PEERS = ("gloo", "mpich", "openmpi", "impi", "ucc", "horovod")
COARSE_SYSTEMS = ("coarse", "coarse-unregistered")
DTYPES = ("float32", "float64", "int32", "int64")

# Horovod's background threads communicate every millisecond, which uses up to half a core of an idle worker. So it
# is restarted for each turn, to keep it out of other systems' turns.
_BUSY_WHEN_IDLE = ("horovod",)
_MAX_ITERATIONS = 3000
_FIRST_BURST = 2
_BURST_GROWTH = 8
# The tensor, its result, and a library's possible temporary copy.
_COPIES_PER_WORKER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """The plan of one run.

    Args:
        systems: Names, in the order of their turns.
        num_workers: Workers of each system.
        sizes: Sizes of one worker's tensor, in bytes.
        dtype: One of DTYPES.
        algorithm: COARSE's algorithm; "" to use the environment's.
        memory_devices: Number of COARSE's memory devices, or the memory of each, in the format of
            COARSE_MEMORY_DEVICES; "" to use the environment's.
        budget_s: Seconds of measuring per system and size, over all rounds; at least 2 iterations per round.
        rounds: Turns of each system at each size.

    Raises:
        ValueError: If a value is out of range.
    """

    systems: tuple[str, ...]
    num_workers: int
    sizes: tuple[int, ...]
    dtype: str = "float32"
    algorithm: str = ""
    memory_devices: str = ""
    budget_s: float = 2.0
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if not self.systems or not self.sizes:
            raise ValueError("nothing to measure: need at least one system and one size")
        if self.num_workers < 2 or self.rounds < 1 or self.budget_s <= 0:
            raise ValueError("workers start at 2, rounds at 1, the budget above 0 s")
        if self.memory_devices:
            Settings(memory_devices=parse_memory_devices(self.memory_devices))
        item_bytes = np.dtype(self.dtype).itemsize
        for nbytes in self.sizes:
            if nbytes < item_bytes or nbytes % item_bytes:
                raise ValueError(f"size {nbytes} B is no positive multiple of {item_bytes} B ({self.dtype})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRecord:
    """One cell of `coarse bench sync`: a system at a tensor size.

    Args:
        nbytes: Size of one worker's tensor.
    """

    system: str
    num_workers: int
    nbytes: int
    dtype: str
    timing: Timing

    @property
    def algbw_gbytes_per_s(self) -> float:
        """Bytes of one worker's tensor divided by the median time of the slowest worker."""
        return self.timing.algbw_gbytes_per_s(self.nbytes)

    def as_json(self) -> dict[str, Any]:
        """The fields of a record line, without provenance."""
        return {
            "bench": "sync",
            "system": self.system,
            "num_workers": self.num_workers,
            "bytes": self.nbytes,
            "dtype": self.dtype,
            **asdict(self.timing),
            "algbw_gbytes_per_s": self.algbw_gbytes_per_s,
        }


def run_sync(plan: SyncPlan, progress: Progress = lambda _: None) -> list[SyncRecord]:
    """Measures every system at every size, in turns; each turn verifies a result before it measures time.

    Raises:
        CoarseError: If memory does not suffice, a worker dies or answers too late, or a result is wrong.
    """
    _check_memory(plan)
    with contextlib.ExitStack() as stack:
        pools = {}
        for system in (each for each in plan.systems if each not in _BUSY_WHEN_IDLE):
            progress(f"starting {system}")
            pools[system] = stack.enter_context(_pool(plan, system))
        records = []
        for nbytes in plan.sizes:
            records += _measure_size(plan, pools, nbytes, progress)
    return records


def num_progress_steps(plan: SyncPlan) -> int:
    """Number of calls of the progress function by run_sync()."""
    num_starts = sum(system not in _BUSY_WHEN_IDLE for system in plan.systems)
    return num_starts + len(plan.systems) * plan.rounds * len(plan.sizes)


def _check_memory(plan: SyncPlan) -> None:
    require_memory(
        max(plan.sizes) * plan.num_workers * _COPIES_PER_WORKER,
        f"{plan.num_workers} workers with tensors of {format_bytes(max(plan.sizes))} may need",
        "Choose smaller --sizes.",
    )


def _pool(plan: SyncPlan, system: str) -> WorkerPool:
    if system == LIMIT:
        return WorkerPool(system, sync_commands, 1, {"num_workers": plan.num_workers})
    chosen = {"algorithm": plan.algorithm, "memory_devices": plan.memory_devices}
    options = {name: value for name, value in chosen.items() if value and system in COARSE_SYSTEMS}
    return WorkerPool(system, sync_commands, plan.num_workers, options)


def _measure_size(
    plan: SyncPlan, pools: Mapping[str, WorkerPool], nbytes: int, progress: Progress
) -> list[SyncRecord]:
    seconds: dict[str, list[float]] = {system: [] for system in plan.systems}
    for round_index in range(plan.rounds):
        for system in plan.systems:
            progress(f"{format_bytes(nbytes)}  {system}  round {round_index + 1} of {plan.rounds}")
            with contextlib.nullcontext(pools[system]) if system in pools else _pool(plan, system) as pool:
                seconds[system] += _take_turn(plan, pool, nbytes)
    return [
        SyncRecord(
            system=system,
            num_workers=plan.num_workers,
            nbytes=nbytes,
            dtype=plan.dtype,
            timing=Timing.from_seconds(values),
        )
        for system, values in seconds.items()
    ]


def _take_turn(plan: SyncPlan, pool: WorkerPool, nbytes: int) -> list[float]:
    """Runs one system's turn. The system frees its tensors at the end, so that only one system needs memory."""
    pool.ask("prepare", nbytes=nbytes, dtype=plan.dtype)
    pool.ask("verify")
    seconds = _run_within(plan.budget_s / plan.rounds, pool)
    pool.ask("release")
    return seconds


def _run_within(budget_s: float, pool: WorkerPool) -> list[float]:
    """Runs iterations until the budget or _MAX_ITERATIONS is used up, in bursts of increasing length.

    A single burst is not possible: if polling workers outnumber cores, most iterations may take a thousand times
    longer than the first.
    """
    seconds: list[float] = []
    burst = _FIRST_BURST
    while burst > 0:
        latest = slowest_worker(pool.ask("run", iterations=burst))
        seconds += (float(each) for each in latest)
        allowed = min(_BURST_GROWTH * burst, _MAX_ITERATIONS - len(seconds))
        burst = iterations_within(budget_s - sum(seconds), float(latest.mean()), at_least=0, at_most=allowed)
    return seconds


def format_bytes(nbytes: int) -> str:
    """A size in common notation: 4 KiB, 1 MiB, 1000 B."""
    for unit, length in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= length and nbytes % length == 0:
            return f"{nbytes // length} {unit}"
    return f"{nbytes} B"

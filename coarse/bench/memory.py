"""`coarse bench memory`: peak memory of a whole training job as counted by the kernel, and its smallest limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from coarse.bench.harness.commands import BenchError
from coarse.bench.harness.control_group import ControlGroup
from coarse.bench.harness.job_memory import available_bytes
from coarse.bench.harness.worker_pool import Progress
from coarse.bench.models import NUM_PARAMETERS
from coarse.bench.train_step.driver import TrainPlan, train_pool
from coarse.errors import CoarseError

BASELINE_MODEL = "bert-tiny"
"""Has the imports and processes of the larger models, but very few parameters."""

PEERS = ("ddp", "ddp-default", "zero", "fsdp", "coarse-overlap")
REFERENCES = ("ddp", "zero", "fsdp")
STEPS = 3
"""Number of steps that a job must take within a limit to count as training in it."""
_BYTES_PER_ELEMENT = 4
_SHARE_OF_AVAILABLE = 0.95
_TIMEOUT_S = 1800.0
_SLOWER_IN_LIMIT = 4  # factor over the time without a limit; a slower job hangs, or only moves pages
_LEAST_TIME_S = 120.0
_NUM_TRIES = 6
_LEAST_SHARE = 2  # the smallest tried limit is the peak divided by this
_ALIGNMENT = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMemory:
    """Memory of a job under one system.

    Args:
        plan: The plan of the run.
        peak_bytes: The kernel's peak count for all processes, from the start to the last step; None if the job did
            not train in the available memory.
        limit_bytes: The smallest tried limit in which it trained; None without a search.
        resolution_bytes: With a limit smaller by this amount, it did not train.
        available_bytes: The limit for the measurement of the peak.
    """

    system: str
    plan: TrainPlan
    peak_bytes: int | None
    limit_bytes: int | None
    resolution_bytes: int
    available_bytes: int

    @property
    def copies(self) -> float | None:
        """The peak in units of the parameters' bytes."""
        if self.peak_bytes is None:
            return None
        return self.peak_bytes / (NUM_PARAMETERS[self.plan.model] * _BYTES_PER_ELEMENT)

    def as_json(self) -> dict[str, Any]:
        """The fields of a record line, without provenance."""
        return {
            "bench": "memory",
            "system": self.system,
            "num_workers": self.plan.num_workers,
            "model": self.plan.model,
            "batch": self.plan.batch,
            "sequence": self.plan.sequence,
            "optimizer": self.plan.optimizer,
            "counted_by": "memory control group, start included",
            "steps": STEPS,
            "peak_bytes": self.peak_bytes,
            "copies_of_parameters": self.copies,
            "smallest_limit_bytes": self.limit_bytes,
            "limit_resolution_bytes": self.resolution_bytes,
            "available_bytes": self.available_bytes,
        }


def run_state_memory(
    plan: TrainPlan, progress: Progress = lambda _: None, *, finds_limits: bool = True
) -> tuple[StateMemory, ...]:
    """Runs each system alone: once with all available memory, then within limits until the smallest is found.

    Args:
        finds_limits: Whether to search for the smallest limit too.

    Raises:
        NoControlGroupError: If memory cannot be counted on this machine; suggests an action.
        CoarseError: If a worker dies or answers too late for a reason other than memory.
    """
    progress(f"{plan.systems[0]}  {BASELINE_MODEL}, which brings files into the page cache")
    _try(replace(plan, model=BASELINE_MODEL), plan.systems[0], limit_bytes=0, timeout_s=_TIMEOUT_S)
    return tuple(_measure(plan, system, progress, finds_limits=finds_limits) for system in plan.systems)


def num_progress_steps(plan: TrainPlan, *, finds_limits: bool = True) -> int:
    """Largest number of calls of the progress function by run_state_memory()."""
    return 1 + len(plan.systems) * (1 + _NUM_TRIES * finds_limits)


def _measure(plan: TrainPlan, system: str, progress: Progress, *, finds_limits: bool) -> StateMemory:
    allowed_bytes = int(_SHARE_OF_AVAILABLE * available_bytes())
    progress(f"{system}  peak")
    began_s = time.monotonic()
    peak_bytes = _try(plan, system, limit_bytes=allowed_bytes, timeout_s=_TIMEOUT_S)
    timeout_s = max(_LEAST_TIME_S, _SLOWER_IN_LIMIT * (time.monotonic() - began_s))
    limit_bytes, resolution_bytes = None, 0
    if peak_bytes is not None and finds_limits:

        def trains_in(limit_bytes: int) -> bool:
            progress(f"{system}  within {limit_bytes / 2**30:.2f} GiB")
            found = _try(plan, system, limit_bytes=limit_bytes, timeout_s=timeout_s)
            return found is not None

        limit_bytes, resolution_bytes = smallest_limit(peak_bytes, trains_in)
    return StateMemory(
        system=system,
        plan=plan,
        peak_bytes=peak_bytes,
        limit_bytes=limit_bytes,
        resolution_bytes=resolution_bytes,
        available_bytes=allowed_bytes,
    )


def smallest_limit(peak_bytes: int, trains_in: Callable[[int], bool]) -> tuple[int, int]:
    """Searches the smallest limit by bisection between the peak and half of it, which is assumed to be too small.

    Args:
        peak_bytes: A limit in which the job trains.
        trains_in: Returns whether the job trains in a limit.

    Returns:
        The smallest limit, and the difference to the next smaller one in which it does not train; in bytes.
    """
    high = -(-peak_bytes // _ALIGNMENT)
    low = high // _LEAST_SHARE
    for _ in range(_NUM_TRIES):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        if trains_in(middle * _ALIGNMENT):
            high = middle
        else:
            low = middle
    return high * _ALIGNMENT, (high - low) * _ALIGNMENT


def _try(plan: TrainPlan, system: str, *, limit_bytes: int, timeout_s: float) -> int | None:
    """Returns the peak of a job of STEPS steps; None if memory does not suffice.

    Raises:
        CoarseError: If it fails for a reason other than memory.
    """
    with ControlGroup(limit_bytes) as group:
        try:
            with train_pool(plan, system, group=group, start_timeout_s=timeout_s) as pool:
                pool.ask("run", timeout_s, steps=STEPS - 1)  # in addition to one uncounted step
                # Before models are closed, because closing copies them for each worker and scripts rarely do it.
                return group.peak_bytes
        except (CoarseError, TimeoutError) as error:
            if limit_bytes and (group.num_killed or _speaks_of_memory(error)):
                return None
            raise


def _speaks_of_memory(error: Exception) -> bool:
    return isinstance(error, TimeoutError | BenchError) and any(
        sign in str(error)
        for sign in ("OutOfDeviceMemoryError", "MemoryError", "not enough memory", "too long")
    )

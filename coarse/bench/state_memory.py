"""`coarse bench memory`: what parameters, gradients and optimizer state take on a node, under each system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coarse.bench.fleet import Fleet
from coarse.bench.memory import PeakPss
from coarse.bench.models import NUM_PARAMETERS
from coarse.bench.train import TrainPlan, check_memory

BASELINE_MODEL = "bert-tiny"
"""Imports and starts what the larger models do, and has next to no parameters."""

REFERENCES = ("ddp-default", "ddp")
_STEPS = 2
_BYTES_PER_ELEMENT = 4

Progress = Callable[[str], None]
"""Called with a description before each piece of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMemory:
    """What the model takes under one system.

    Args:
        plan: What was run.
        peak_bytes: Highest PSS of all processes in a few steps, less that of the same job with BASELINE_MODEL.
    """

    system: str
    plan: TrainPlan
    peak_bytes: int

    @property
    def copies(self) -> float:
        """The same in units of the parameters' bytes."""
        return self.peak_bytes / (NUM_PARAMETERS[self.plan.model] * _BYTES_PER_ELEMENT)

    def as_json(self) -> dict[str, Any]:
        """The fields of a record line, beside provenance."""
        return {
            "bench": "memory",
            "system": self.system,
            "num_workers": self.plan.num_workers,
            "model": self.plan.model,
            "batch": self.plan.batch,
            "sequence": self.plan.sequence,
            "optimizer": self.plan.optimizer,
            "peak_bytes": self.peak_bytes,
            "copies_of_parameters": self.copies,
        }


def run_state_memory(plan: TrainPlan, progress: Progress = lambda _: None) -> tuple[StateMemory, ...]:
    """Runs each system alone, with the model and without.

    Raises:
        CoarseError: If memory does not suffice, or a worker dies or answers too late.
    """
    check_memory(plan)
    results = []
    for system in plan.systems:
        peaks = []
        for model in (plan.model, BASELINE_MODEL):
            progress(f"{system}  {model}  {plan.num_workers} workers")
            peaks.append(_peak_bytes(plan, system, model))
        results.append(StateMemory(system=system, plan=plan, peak_bytes=peaks[0] - peaks[1]))
    return tuple(results)


def num_progress_steps(plan: TrainPlan) -> int:
    """How often run_state_memory() calls its progress function."""
    return 2 * len(plan.systems)


def _peak_bytes(plan: TrainPlan, system: str, model: str) -> int:
    options = {
        "model": model,
        "batch": plan.batch,
        "sequence": plan.sequence,
        "optimizer": plan.optimizer,
        "threads": plan.threads,
    }
    fleet = Fleet(f"train-{system}", plan.num_workers, options, threads=plan.threads)
    with fleet, PeakPss(fleet.descendants) as memory:
        fleet.start()
        fleet.ask("run", steps=_STEPS)
    return memory.peak_bytes

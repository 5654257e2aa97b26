"""`coarse bench train-step`: a real training step under COARSE, torch DDP and without any communication."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coarse.bench.harness.commands import BenchError
from coarse.bench.harness.control_group import ControlGroup
from coarse.bench.harness.job_memory import JobMemory, available_bytes
from coarse.bench.harness.worker_pool import START_TIMEOUT_S, Progress, WorkerPool, time_for
from coarse.bench.timing import Timing, iterations_within, slowest_worker
from coarse.bench.train_step.systems import CPU, LEARNING_RATE, PHASES, TrainingJob, train_commands

PEERS = ("ddp", "ddp-tuned", "ddp-default", "none")
DDPS = ("ddp", "ddp-tuned", "ddp-default")
"""Configurations of torch DDP; figures "over DDP" compare with the fastest measured one."""

_MIN_STEPS = 3
_MAX_STEPS = 500
_PROBE_STEPS = 3
_MEMORY_STEPS = 3
# Parameters, gradients, two moments, and communication buffers.
_ELEMENTS_PER_PARAMETER = 5
# For other memory use: the driver itself, and caches that must not be evicted while steps are timed.
_MEMORY_MARGIN = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan(TrainingJob):
    """The plan of one run.

    Args:
        steps: Timed steps in each round; 0 for as many as fit the budget.
        budget_s: Seconds of timed steps per system, over all rounds.

    Raises:
        ValueError: If a value is out of range.
    """

    steps: int = 0
    budget_s: float = 20.0
    rounds: int = 4

    def __post_init__(self) -> None:
        TrainingJob.__post_init__(self)
        if self.steps < 0 or self.budget_s <= 0:
            raise ValueError("need steps from 0 (as the budget allows), a budget above 0 s")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """A system when it runs alone: the result of its first step, and its memory."""

    losses: tuple[float, ...]
    parameter_hashes: tuple[str, ...]
    parameter_sample: tuple[float, ...]
    parameter_bytes: int
    peak_bytes: int
    """Peak memory of all processes, including the start, as counted by JobMemory."""
    memory_counted_by: str = ""
    peak_gpu_bytes: int = 0
    """Peak GPU memory of torch in all workers; 0 without a GPU."""
    used_gpu_bytes: int = 0
    """GPU memory of all processes, after some steps, on the workers' GPUs; 0 without a GPU."""
    gpu: str = ""
    backend: str = ""
    """Backend of torch's default process group, which other systems use for reduction; "" if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Figures of one system. Phases are those of the slowest worker; their medians need not add up.

    Args:
        phases: Timing of each of training.PHASES.
    """

    system: str
    plan: TrainPlan
    first_step: FirstStep
    phases: Mapping[str, Timing]

    @property
    def step(self) -> Timing:
        """Timing of the whole step."""
        return self.phases["step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All systems of a run, each compared with the step without communication and with DDP."""

    results: tuple[TrainResult, ...]
    side_by_side: bool
    """Whether all systems kept running and took turns; otherwise each was restarted for every turn."""

    def result(self, system: str) -> TrainResult | None:
        """The result of a system; None if it was not measured."""
        return next((each for each in self.results if each.system == system), None)

    @property
    def ddp(self) -> TrainResult | None:
        """The DDP with the shortest median step; None if none was measured."""
        found = [each for each in self.results if each.system in DDPS]
        return min(found, key=lambda each: each.step.p50_us, default=None)

    def blocked_us(self, result: TrainResult) -> float | None:
        """Median step minus the median step without communication: the step's wait for its gradients."""
        bare = self.result("none")
        return None if bare is None else result.step.p50_us - bare.step.p50_us

    def blocked_percent_of_ddp(self, result: TrainResult) -> float | None:
        """Blocked communication time as a share of the fastest DDP's."""
        ddp = self.ddp
        blocked_us = self.blocked_us(result)
        ddp_us = None if ddp is None else self.blocked_us(ddp)
        return None if blocked_us is None or not ddp_us or ddp_us < 0 else 100 * blocked_us / ddp_us

    def speedup_over_ddp(self, result: TrainResult) -> float | None:
        """The fastest DDP's median step divided by this system's."""
        ddp = self.ddp
        return None if ddp is None else ddp.step.p50_us / result.step.p50_us

    def overhead_percent(self, result: TrainResult) -> float | None:
        """Increase of the median step over the bare one, in percent."""
        bare = self.result("none")
        return None if bare is None else 100 * (result.step.p50_us / bare.step.p50_us - 1)

    def as_json(self, result: TrainResult) -> dict[str, Any]:
        """The fields of a record line, without provenance."""
        plan, first = result.plan, result.first_step
        return {
            "bench": "train-step",
            "system": result.system,
            "num_workers": plan.num_workers,
            "bytes": first.parameter_bytes,
            **asdict(result.step),
            "algbw_gbytes_per_s": None,
            **plan.as_json(),
            **{f"{phase}_p50_us": result.phases[phase].p50_us for phase in PHASES if phase != "step"},
            "blocked_us": self.blocked_us(result),
            "blocked_percent_of_ddp": self.blocked_percent_of_ddp(result),
            "speedup_over_ddp": self.speedup_over_ddp(result),
            "peak_bytes": first.peak_bytes,
            "memory_counted_by": first.memory_counted_by,
            "gpu": first.gpu,
            "backend": first.backend,
            "peak_gpu_bytes": first.peak_gpu_bytes,
            "used_gpu_bytes": first.used_gpu_bytes,
            "parameter_hashes": list(first.parameter_hashes),
            "side_by_side": self.side_by_side,
        }


def run_train(plan: TrainPlan, progress: Progress = lambda _: None) -> Comparison:
    """Verifies every system alone, then times them in turns.

    If memory suffices, all systems keep running and take turns; otherwise each is restarted for every turn.

    Raises:
        CoarseError: If memory does not suffice, a worker dies or answers too late, or parameters disagree.
    """
    plan.require_memory(_ELEMENTS_PER_PARAMETER, "train")
    first_steps = {system: _try_alone(plan, system, progress) for system in plan.systems}
    _verify(plan, first_steps)
    needed = _MEMORY_MARGIN * sum(first.peak_bytes for first in first_steps.values())
    # Systems that run at the same time on a GPU would share its memory, which was not checked.
    side_by_side = plan.device == CPU and needed <= available_bytes()
    results = tuple(
        TrainResult(system=system, plan=plan, first_step=first_steps[system], phases=phases)
        for system, phases in _measure(plan, progress, side_by_side=side_by_side).items()
    )
    return Comparison(results=results, side_by_side=side_by_side)


def num_progress_steps(plan: TrainPlan) -> int:
    """Number of calls of the progress function by run_train()."""
    return len(plan.systems) * (1 + plan.rounds)


def train_pool(
    plan: TrainingJob,
    system: str,
    *,
    group: ControlGroup | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> WorkerPool:
    """The workers of a system; arguments as for WorkerPool."""
    return WorkerPool(
        system,
        train_commands,
        plan.num_workers,
        plan.as_json(),
        threads=plan.threads,
        group=group,
        start_timeout_s=start_timeout_s,
    )


def _try_alone(plan: TrainPlan, system: str, progress: Progress) -> FirstStep:
    """Takes the first steps of a system alone on the machine, and measures its memory."""
    progress(f"{system}  verifying")
    with JobMemory() as memory, train_pool(plan, system, group=memory.group) as pool:
        answers = pool.ask("first_step")
        pool.ask("run", steps=_MEMORY_STEPS)
        gpu_memories = pool.ask("gpu_memory")
        peak_bytes = memory.peak_bytes  # before models are closed
    return FirstStep(
        losses=tuple(answer["loss"] for answer in answers),
        parameter_hashes=tuple(answer["hash"] for answer in answers),
        parameter_sample=tuple(answers[0]["sample"]),
        parameter_bytes=answers[0]["parameter_bytes"],
        peak_bytes=peak_bytes,
        memory_counted_by=memory.how,
        peak_gpu_bytes=sum(each["peak_bytes"] for each in gpu_memories),
        used_gpu_bytes=sum({each["device"]: each["used_bytes"] for each in gpu_memories}.values()),
        gpu=answers[0]["gpu"],
        backend=answers[0]["backend"],
    )


def _verify(plan: TrainPlan, first_steps: Mapping[str, FirstStep]) -> None:
    """Checks that after one step all workers have the same parameters, equal to DDP's.

    Workers start from different parameters and use different batches. So both conditions hold only if the initial
    parameters were broadcast and the gradients averaged.

    Raises:
        BenchError: If parameters differ.
    """
    for system, first in first_steps.items():
        if system != "none" and len(set(first.parameter_hashes)) != 1:
            raise BenchError(
                f"{system}: workers disagree after one step: {', '.join(first.parameter_hashes)}"
            )
    ddp = next((first_steps[system] for system in DDPS if system in first_steps), None)
    for system, first in first_steps.items():
        if ddp is not None and system != "none" and not _close(first.parameter_sample, ddp.parameter_sample):
            raise BenchError(f"{system}: parameters after one step are not those of ddp ({plan.model})")


def _close(sample: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether two parameter samples agree except for the order of additions.

    Adam's first update is nearly the gradient's sign, so an element whose gradient is only rounding error may differ
    by two learning rates; 99 of 100 must agree closely.
    """
    difference = np.abs(np.asarray(sample) - np.asarray(reference))
    return bool(
        difference.max() <= 2.5 * LEARNING_RATE and np.mean(difference <= 0.01 * LEARNING_RATE) >= 0.99
    )


class _Times:
    """Seconds of each phase on the slowest worker, step by step."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[NDArray[np.float64]]] = {phase: [] for phase in PHASES}

    def add(self, answers: Sequence[Mapping[str, Sequence[float]]]) -> None:
        """Adds one turn's answers, one per worker."""
        for phase, turns in self._seconds.items():
            turns.append(slowest_worker([answer[phase] for answer in answers]))

    def timings(self) -> dict[str, Timing]:
        """Timing of each phase over all turns."""
        return {phase: Timing.from_seconds(np.concatenate(turns)) for phase, turns in self._seconds.items()}


def _measure(plan: TrainPlan, progress: Progress, *, side_by_side: bool) -> dict[str, dict[str, Timing]]:
    """Phases of each system; without `side_by_side`, a system is started anew for each of its turns."""
    times = {system: _Times() for system in plan.systems}
    with contextlib.ExitStack() as stack:
        running = {}
        for system in plan.systems if side_by_side else ():
            running[system] = stack.enter_context(train_pool(plan, system))
        for round_index in range(plan.rounds):
            for system in plan.systems:
                anew = "" if side_by_side else " (started anew)"
                progress(f"{system}  round {round_index + 1} of {plan.rounds}{anew}")
                turn = contextlib.nullcontext(running[system]) if side_by_side else train_pool(plan, system)
                with turn as pool:
                    times[system].add(_take_turn(plan, pool))
    return {system: each.timings() for system, each in times.items()}


def _take_turn(plan: TrainPlan, pool: WorkerPool) -> list[dict[str, list[float]]]:
    steps = plan.steps
    if not steps:
        probe = slowest_worker([answer["step"] for answer in pool.ask("run", steps=_PROBE_STEPS)])
        share_s = plan.budget_s / plan.rounds
        steps = iterations_within(share_s, float(np.median(probe)), at_least=_MIN_STEPS, at_most=_MAX_STEPS)
    answers: list[dict[str, list[float]]] = pool.ask("run", time_for(steps), steps=steps)
    return answers

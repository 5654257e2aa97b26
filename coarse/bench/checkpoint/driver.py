"""`coarse bench checkpoint`: the cost of saves during training, compared with torch.save and DCP's async_save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coarse.bench.checkpoint.systems import checkpoint_commands
from coarse.bench.harness.commands import BenchError
from coarse.bench.harness.job_memory import PeakMemory
from coarse.bench.harness.worker_pool import Progress, WorkerPool, time_for
from coarse.bench.timing import Timing, slowest_worker
from coarse.bench.train_step.systems import TrainingJob
from coarse.process.scratch import Scratch

SYSTEMS = ("coarse", "coarse-workers", "torch", "dcp")

_PHASES = ("stop", "to_disk", "step")
_MEMORY_STEPS = 3
# Parameters, gradients, two moments, communication buffers and a copy of the saved data.
_ELEMENTS_PER_PARAMETER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan(TrainingJob):
    """The plan of one run.

    Args:
        folder: Folder for checkpoints; "" for the system's temporary folder.
        saves: Saves in each round.
        every: Steps between two saves, and after the last one.

    Raises:
        ValueError: If a value is out of range.
    """

    folder: str = ""
    saves: int = 2
    every: int = 40

    def __post_init__(self) -> None:
        TrainingJob.__post_init__(self)
        if min(self.saves, self.every) < 1 or self.num_workers < 2:
            raise ValueError("saves and every start at 1, workers at 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Figures of one system; seconds are those of the slowest worker.

    Args:
        stop: Time for which a save paused the training thread.
        to_disk: Time from the last save's beginning until the checkpoint was on the disk.
        step: Time of all steps, including the saves after some of them.
        added_s: Time of all steps beyond the same number of median steps, per save.
        longest_s: The longest step.
        extra_bytes: Peak of the kernel's allocated memory while the loop saved, minus that of training before.
        saved_bytes: Size of the files of a save.
    """

    system: str
    plan: SavePlan
    stop: Timing
    to_disk: Timing
    step: Timing
    added_s: float
    longest_s: float
    extra_bytes: int
    saved_bytes: int

    @property
    def longest_steps(self) -> float:
        """The longest step as a multiple of the median step."""
        return 1e6 * self.longest_s / self.step.p50_us

    def as_json(self) -> dict[str, Any]:
        """The fields of a record line, without provenance."""
        plan = self.plan
        timings: dict[str, Mapping[str, Any] | None] = {
            "to_disk": asdict(self.to_disk),
            "step": asdict(self.step),
        }
        return {
            "bench": "checkpoint",
            "system": self.system,
            "num_workers": plan.num_workers,
            "bytes": self.saved_bytes,
            **asdict(self.stop),
            "algbw_gbytes_per_s": None,
            **plan.as_json(),
            **timings,
            "every": plan.every,
            "added_s_per_save": self.added_s,
            "longest_step_s": self.longest_s,
            "extra_bytes": self.extra_bytes,
        }


@dataclass(slots=True)
class _Measured:
    """Seconds of one system over its rounds, and its memory."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in _PHASES})
    extra_bytes: int = 0
    saved_bytes: int = 0

    def add(self, answers: Sequence[Mapping[str, Sequence[float]]]) -> None:
        for phase in _PHASES:
            self.seconds[phase] += slowest_worker([answer[phase] for answer in answers]).tolist()

    def result(self, system: str, plan: SavePlan) -> SaveResult:
        timings = {phase: Timing.from_seconds(each) for phase, each in self.seconds.items()}
        steps = self.seconds["step"]
        beyond_s = sum(steps) - len(steps) * timings["step"].p50_us / 1e6
        return SaveResult(
            system=system,
            plan=plan,
            stop=timings["stop"],
            to_disk=timings["to_disk"],
            step=timings["step"],
            added_s=beyond_s / len(self.seconds["stop"]),
            longest_s=max(steps),
            extra_bytes=self.extra_bytes,
            saved_bytes=self.saved_bytes,
        )


def run_checkpoint(plan: SavePlan, progress: Progress = lambda _: None) -> tuple[SaveResult, ...]:
    """Measures the systems in turns, each alone on the machine; fails if a system's checkpoint is wrong.

    Raises:
        CoarseError: If memory does not suffice, a worker fails, or a checkpoint has wrong contents.
    """
    plan.require_memory(_ELEMENTS_PER_PARAMETER, "train and save")
    measured = {system: _Measured() for system in plan.systems}
    for round_index in range(plan.rounds):
        for system in plan.systems:
            progress(f"{system}  round {round_index + 1} of {plan.rounds}")
            _take_turn(plan, system, measured[system])
    return tuple(each.result(system, plan) for system, each in measured.items())


def num_progress_steps(plan: SavePlan) -> int:
    """Number of calls of the progress function by run_checkpoint()."""
    return len(plan.systems) * plan.rounds


def _take_turn(plan: SavePlan, system: str, measured: _Measured) -> None:
    if plan.folder:
        Path(plan.folder).mkdir(parents=True, exist_ok=True)
    with Scratch("bench", parent=plan.folder or None) as folder:
        options = {**plan.as_json(), "folder": str(folder)}
        with WorkerPool(system, checkpoint_commands, plan.num_workers, options, threads=plan.threads) as pool:
            pool.ask("first_step")
            with PeakMemory() as training:
                pool.ask("run", steps=_MEMORY_STEPS)
            num_steps = plan.every * (plan.saves + 1)
            with PeakMemory() as saving:
                answers = pool.ask("save", time_for(num_steps), saves=plan.saves, every=plan.every)
            measured.add(answers)
            measured.extra_bytes = max(measured.extra_bytes, saving.peak_bytes - training.peak_bytes)
            if not all(pool.ask("check")):
                raise BenchError(f"{system}: what was saved is not the model ({plan.model})")
            measured.saved_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

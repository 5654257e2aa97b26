"""`coarse bench checkpoint`: the cost of saves during training, compared with torch.save and DCP's async_save."""

from __future__ import annotations

import math
import statistics
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

_PHASES = ("stop", "to_disk", "step", "steps_to_disk")
_MEMORY_STEPS = 3
# Parameters, gradients, two moments, communication buffers and a copy of the saved data.
_ELEMENTS_PER_PARAMETER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan(TrainingJob):
    """The plan of one run.

    Args:
        folder: Folder for checkpoints; "" for the system's temporary folder.
        saves: Saves in each round.
        every: Steps between two saves, and after the last one. A save must be on the disk within half of them: the
            other half shows how long steps take without one.

    Raises:
        ValueError: If a value is out of range.
    """

    folder: str = ""
    saves: int = 4
    every: int = 40

    def __post_init__(self) -> None:
        TrainingJob.__post_init__(self)
        if self.saves < 1 or self.every < 2 or self.num_workers < 2:
            raise ValueError("saves start at 1, every and workers at 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Figures of one system; seconds are those of the slowest worker.

    Args:
        stop: Time for which a save paused the training thread.
        to_disk: Time from the last save's beginning until the checkpoint was on the disk.
        step: Time of all steps, including the saves after some of them.
        added_s: Time of the steps from a save on beyond as many steps just before the next one; mean of all saves.
        added_error_s: Its standard error; not a number for one save.
        setup_s: Time of the steps before the first save beyond as many steps without one, mean of all rounds.
        longest_s: The longest step while a save may be in progress.
        longest_without_s: The longest of as many steps without one.
        extra_bytes: Peak of the kernel's allocated memory while the loop saved, minus that of training before.
        saved_bytes: Size of the files of a save.
    """

    system: str
    plan: SavePlan
    stop: Timing
    to_disk: Timing
    step: Timing
    added_s: float
    added_error_s: float
    setup_s: float
    longest_s: float
    longest_without_s: float
    extra_bytes: int
    saved_bytes: int

    @property
    def longest_steps(self) -> float:
        """The longest step of a save as a multiple of the median step."""
        return 1e6 * self.longest_s / self.step.p50_us

    @property
    def longest_steps_without(self) -> float:
        """The longest step without a save as a multiple of the median step."""
        return 1e6 * self.longest_without_s / self.step.p50_us

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
            "added_error_s": None if math.isnan(self.added_error_s) else self.added_error_s,
            "setup_s": self.setup_s,
            "longest_step_s": self.longest_s,
            "longest_step_without_s": self.longest_without_s,
            "extra_bytes": self.extra_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSteps:
    """The steps of one round: `every - 1` before the first save, then for each save a half with it and one without.

    Args:
        before: Seconds of the steps before the first save.
        saving: For each save, seconds of the step that it ends and of those that follow it.
        without: For each save, seconds of as many steps after those.
    """

    before: Sequence[float]
    saving: Sequence[Sequence[float]]
    without: Sequence[Sequence[float]]

    @classmethod
    def of(cls, steps: Sequence[float], saves: int, every: int) -> SaveSteps:
        """Divides the seconds of all steps of a round, `every * (saves + 1)` of them."""
        half = every // 2
        begins = [every * number - 1 for number in range(1, saves + 1)]
        return cls(
            before=steps[: begins[0]],
            saving=[steps[begin : begin + half] for begin in begins],
            without=[steps[begin + half : begin + 2 * half] for begin in begins],
        )

    @property
    def added_s(self) -> list[float]:
        """What each save added."""
        return [sum(saving) - sum(without) for saving, without in zip(self.saving, self.without, strict=True)]

    @property
    def setup_s(self) -> float:
        """What the steps before the first save took beyond as many steps without one."""
        step_s = statistics.fmean(statistics.fmean(part) for part in self.without)
        return sum(self.before) - len(self.before) * step_s


@dataclass(slots=True)
class _Measured:
    """Seconds of one system over its rounds, and its memory."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in _PHASES})
    rounds: list[SaveSteps] = field(default_factory=list)
    extra_bytes: int = 0
    saved_bytes: int = 0

    def add(self, plan: SavePlan, answers: Sequence[Mapping[str, Sequence[float]]]) -> None:
        slowest = {phase: slowest_worker([answer[phase] for answer in answers]).tolist() for phase in _PHASES}
        for phase, seconds in slowest.items():
            self.seconds[phase] += seconds
        self.rounds.append(SaveSteps.of(slowest["step"], plan.saves, plan.every))

    def result(self, system: str, plan: SavePlan) -> SaveResult:
        timings = {phase: Timing.from_seconds(self.seconds[phase]) for phase in ("stop", "to_disk", "step")}
        added_s = [each for steps in self.rounds for each in steps.added_s]
        return SaveResult(
            system=system,
            plan=plan,
            stop=timings["stop"],
            to_disk=timings["to_disk"],
            step=timings["step"],
            added_s=statistics.fmean(added_s),
            added_error_s=statistics.stdev(added_s) / math.sqrt(len(added_s))
            if len(added_s) > 1
            else math.nan,
            setup_s=statistics.fmean(each.setup_s for each in self.rounds),
            longest_s=max(max(part) for each in self.rounds for part in each.saving),
            longest_without_s=max(max(part) for each in self.rounds for part in each.without),
            extra_bytes=self.extra_bytes,
            saved_bytes=self.saved_bytes,
        )


def run_checkpoint(plan: SavePlan, progress: Progress = lambda _: None) -> tuple[SaveResult, ...]:
    """Measures the systems in turns, each alone on the machine; fails if a system's checkpoint is wrong.

    Raises:
        CoarseError: If memory does not suffice, a worker fails, a checkpoint has wrong contents, or a save is in
            progress for more than half of the steps to the next one.
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
            measured.add(plan, answers)
            _require_steps_without(plan, system, measured)
            measured.extra_bytes = max(measured.extra_bytes, saving.peak_bytes - training.peak_bytes)
            if not all(pool.ask("check")):
                raise BenchError(f"{system}: what was saved is not the model ({plan.model})")
            measured.saved_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _require_steps_without(plan: SavePlan, system: str, measured: _Measured) -> None:
    longest = int(max(measured.seconds["steps_to_disk"]))
    if longest > plan.every // 2:
        raise BenchError(
            f"{system}: a save was in progress for {longest} steps of {plan.every}; give at least "
            f"--every={2 * longest + 2}, so that half of the steps are without a save"
        )

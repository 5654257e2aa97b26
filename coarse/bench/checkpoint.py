"""`coarse bench checkpoint`: what a save costs the training that goes on, beside torch.save and DCP's async_save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coarse.bench.fleet import BenchError, Fleet, time_for
from coarse.bench.memory import PeakPss, available_bytes
from coarse.bench.models import MODELS, NUM_PARAMETERS
from coarse.bench.statistics import Timing, slowest_worker
from coarse.bench.train import Progress
from coarse.bench.training import OPTIMIZERS
from coarse.scratch import Scratch

SYSTEMS = ("coarse", "coarse-workers", "torch", "dcp")

_PHASES = ("stop", "to_disk", "quiet", "writing")
_MEMORY_STEPS = 3
# Parameters, gradients, two moments, communication buffers and a copy of what is saved, of four bytes each.
_BYTES_PER_PARAMETER = 8 * 4
_PROCESS_BYTES = 300 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What one run measures.

    Args:
        systems: Of SYSTEMS, in the order of their turns.
        folder: Where to save; "" for the system's temporary folder.
        saves: Timed saves of each round.
        rounds: Turns that each system takes.

    Raises:
        ValueError: If a value is out of range.
    """

    systems: tuple[str, ...]
    model: str
    batch: int
    sequence: int
    num_workers: int
    threads: int
    optimizer: str
    folder: str = ""
    saves: int = 5
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model {self.model!r} is none of {', '.join(MODELS)}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r} is none of {', '.join(OPTIMIZERS)}")
        if min(self.batch, self.sequence, self.threads, self.saves, self.rounds) < 1 or self.num_workers < 2:
            raise ValueError("batch, sequence, threads, saves and rounds start at 1, workers at 2")
        if not self.systems:
            raise ValueError("need at least one system")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Figures of one system; seconds are those of the slowest worker.

    Args:
        stop: How long the training thread stood still for a save.
        to_disk: From a save's beginning until the checkpoint was on the disk.
        quiet: Steps while no save was under way.
        writing: Steps while one was; None if training stood still.
        extra_bytes: Peak of memory during a save, less that of training without.
        saved_bytes: Length of the files of a save.
    """

    system: str
    plan: SavePlan
    stop: Timing
    to_disk: Timing
    quiet: Timing
    writing: Timing | None
    extra_bytes: int
    saved_bytes: int

    @property
    def slowdown_percent(self) -> float | None:
        """By how much the median step is longer while a save is under way."""
        return None if self.writing is None else 100 * (self.writing.p50_us / self.quiet.p50_us - 1)

    def as_json(self) -> dict[str, Any]:
        """The fields of a record line, beside provenance."""
        plan = self.plan
        timings: dict[str, Mapping[str, Any] | None] = {
            "to_disk": asdict(self.to_disk),
            "quiet_step": asdict(self.quiet),
            "writing_step": asdict(self.writing) if self.writing else None,
        }
        return {
            "bench": "checkpoint",
            "system": self.system,
            "num_workers": plan.num_workers,
            "bytes": self.saved_bytes,
            **asdict(self.stop),
            "algbw_gbytes_per_s": None,
            "model": plan.model,
            "batch": plan.batch,
            "sequence": plan.sequence,
            "threads": plan.threads,
            "optimizer": plan.optimizer,
            **timings,
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
            if answers[0][phase]:
                self.seconds[phase] += slowest_worker([answer[phase] for answer in answers]).tolist()

    def result(self, system: str, plan: SavePlan) -> SaveResult:
        timings = {phase: Timing.from_seconds(each) for phase, each in self.seconds.items() if each}
        return SaveResult(
            system=system,
            plan=plan,
            stop=timings["stop"],
            to_disk=timings["to_disk"],
            quiet=timings["quiet"],
            writing=timings.get("writing"),
            extra_bytes=self.extra_bytes,
            saved_bytes=self.saved_bytes,
        )


def run_checkpoint(plan: SavePlan, progress: Progress = lambda _: None) -> tuple[SaveResult, ...]:
    """Measures every system in turns, each alone on the machine; what it saved is compared before it is timed.

    Raises:
        CoarseError: If memory does not suffice, a worker fails, or a checkpoint is not what was to be saved.
    """
    _check_memory(plan)
    measured = {system: _Measured() for system in plan.systems}
    for round_index in range(plan.rounds):
        for system in plan.systems:
            progress(f"{system}  round {round_index + 1} of {plan.rounds}")
            _take_turn(plan, system, measured[system], counts_memory=round_index == 0)
    return tuple(each.result(system, plan) for system, each in measured.items())


def num_progress_steps(plan: SavePlan) -> int:
    """How often run_checkpoint() calls its progress function."""
    return len(plan.systems) * plan.rounds


def _check_memory(plan: SavePlan) -> None:
    needed = (NUM_PARAMETERS[plan.model] * _BYTES_PER_PARAMETER + _PROCESS_BYTES) * plan.num_workers
    if needed > available_bytes():
        raise BenchError(
            f"{plan.num_workers} workers that train and save {plan.model} need about {needed / 2**30:.1f} GiB, "
            f"{available_bytes() / 2**30:.1f} GiB are available. Choose a smaller --model."
        )


def _take_turn(plan: SavePlan, system: str, measured: _Measured, *, counts_memory: bool) -> None:
    if plan.folder:
        Path(plan.folder).mkdir(parents=True, exist_ok=True)
    with Scratch("bench", parent=plan.folder or None) as folder:
        options = {
            "model": plan.model,
            "batch": plan.batch,
            "sequence": plan.sequence,
            "optimizer": plan.optimizer,
            "threads": plan.threads,
            "folder": str(folder),
        }
        with Fleet(f"save-{system}", plan.num_workers, options, threads=plan.threads) as fleet:
            fleet.start()
            fleet.ask("first_step")
            if counts_memory:
                measured.extra_bytes = _extra_memory(fleet)
            if not all(fleet.ask("check")):
                raise BenchError(f"{system}: what was saved is not the model ({plan.model})")
            measured.saved_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            measured.add(fleet.ask("save", time_for(plan.saves), saves=plan.saves))


def _extra_memory(fleet: Fleet) -> int:
    """Peak memory while a save is under way, less the peak of training alone."""
    with PeakPss(fleet.descendants) as training:
        fleet.ask("run", steps=_MEMORY_STEPS)
    with PeakPss(fleet.descendants) as saving:
        fleet.ask("save", saves=1)
    return max(0, saving.peak_bytes - training.peak_bytes)

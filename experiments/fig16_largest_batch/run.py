"""Figure 16(e): the largest batch that fits in limited memory, and the training speed with it.

On one node the paper's AllReduce has memory for a batch of 2, and COARSE for one of 4 (V-D); its memory devices store
the parameters (III-D). Here all processes of a job, including launcher and memory devices,
share a control group with a memory limit from their start.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from coarse.bench.harness.commands import BenchError
from coarse.bench.harness.control_group import ControlGroup
from coarse.profiler.figures import COLOURS
from coarse.profiler.profile import MEASURED
from experiments.common import FOLDER, Experiment, Finding, Options, Outcome, main
from experiments.expectation import Check, Expectation, Measured, NumberCheck, judge_number
from experiments.quiet import MOST_BUSY, measure_in_quiet

NUM_WORKERS = 2
DDP = "ddp"
LABELS = {
    DDP: "DDP",
    "fsdp": "FSDP2",
    "coarse-offload": "COARSE, step()",
    "coarse-overlap": "COARSE, in backward",
}
SOURCE = "V-D, Fig 16e"
BATCH = Expectation(what="batch", low=2, high=2, unit=" times DDP's", source=SOURCE)
"""A batch of 4 where AllReduce has memory for 2."""

SPEED = Expectation(
    what="samples/s", low=1.483, high=1.483, tolerance=0.1, unit=" times DDP's", source=SOURCE
)
"""48.3% faster with it. Tolerance: two runs of the same job differ by some per cent."""

_SCRIPT = Path(__file__).with_name("train.py")
_LAUNCHER = ("-m", "coarse", "run", "-n", str(NUM_WORKERS))
"""Starts every system's job, and counts too: torchrun imports PyTorch, which would cost DDP a batch."""
_TIMEOUT_S = 600
_REFUSED = "OutOfDeviceMemoryError"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training job and its memory limit.

    Args:
        limit_bytes: Memory of all processes together.
        most: The largest batch to try.
        steps: Timed steps of each trial.
    """

    model: str
    limit_bytes: int
    most: int
    steps: int


FULL = Case(model="bert-base", limit_bytes=4800 << 20, most=32, steps=3)
QUICK = Case(model="bert-tiny", limit_bytes=4800 << 20, most=2, steps=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial with a batch that fits.

    Args:
        batch: Samples of each worker.
        steps_s: Seconds of each step of the slowest worker.
        peak_bytes: Peak memory of the job, including cached file pages.
    """

    batch: int
    steps_s: tuple[float, ...]
    peak_bytes: int

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all workers together, in the median step."""
        return NUM_WORKERS * self.batch / statistics.median(self.steps_s)

    def speedup(self, other: Trial) -> Measured:
        """Samples per second as a multiple of another trial's; its spread is that of the steps of both."""
        factor = self.batch / other.batch
        return Measured(
            value=self.samples_per_s / other.samples_per_s,
            low=factor * min(other.steps_s) / max(self.steps_s),
            high=factor * max(other.steps_s) / min(self.steps_s),
        )


def largest(attempt: Callable[[int], Trial | None], most: int) -> Trial | None:
    """The largest batch that fits: doubles the batch until it no longer fits, then bisects.

    Args:
        attempt: Returns None if the batch does not fit; larger ones are then assumed not to fit either.
        most: The largest batch to try.
    """
    best, fails = None, most + 1
    batch = 1
    while batch < fails:
        trial = attempt(batch)
        if trial is None:
            fails = batch
        else:
            best = trial
        fitting = best.batch if best else 0
        batch = min(2 * fitting, most) if fails > most and fitting < most else (fitting + fails) // 2
        if batch == fitting:
            break
    return best


def attempt_batch(case: Case, system: str, batch: int) -> Trial | None:
    """Trains with a batch in a control group of its own; None if the memory is too small.

    Raises:
        BenchError: If training fails for another reason.
    """
    with (
        ControlGroup(case.limit_bytes) as limit,
        tempfile.TemporaryDirectory(prefix="coarse-fig16-") as folder,
    ):
        report = Path(folder, "steps.json")
        job = [sys.executable, *_LAUNCHER, str(_SCRIPT), system, "--model", case.model, "--batch", str(batch)]
        job += ["--steps", str(case.steps), "--report", str(report)]
        done = subprocess.run(
            limit.command(job), capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=folder, env=_env()
        )
        if done.returncode == 0:
            steps_s = tuple(json.loads(report.read_text()))
            return Trial(batch=batch, steps_s=steps_s, peak_bytes=limit.peak_bytes)
        if limit.num_killed or _REFUSED in done.stderr:
            return None
    raise BenchError(f"{system}, batch {batch}: {done.stderr.strip() or done.returncode}")


def run(options: Options) -> Outcome:
    """Finds the largest batch of each system.

    Raises:
        BusyMachineError: If other work takes the processors in each attempt, unless it is a quick run.
    """
    case = QUICK if options.is_quick else FULL
    most_busy = math.inf if options.is_quick else MOST_BUSY

    def attempt(system: str, batch: int) -> Trial | None:
        what = f"batch {batch} of {LABELS[system]}"
        return measure_in_quiet(what, lambda: attempt_batch(case, system, batch), most_busy=most_busy)

    found: dict[str, Trial | None] = {}
    for system in LABELS:
        found[system] = largest(partial(attempt, system), case.most)
        options.progress(f"{LABELS[system]}: {_words(found[system])}")
    return Outcome(
        findings=[_finding(case, system, found) for system in found],
        data=[
            {"kind": MEASURED, "system": system, **asdict(case), **(asdict(trial) if trial else {"batch": 0})}
            for system, trial in found.items()
        ],
        pictures={"largest-batch": draw(case, found)},
    )


def _finding(case: Case, system: str, found: dict[str, Trial | None]) -> Finding:
    where = f"{case.model}, {NUM_WORKERS} workers in {case.limit_bytes / 2**30:.1f} GiB"
    return Finding(
        ran=f"largest batch, {where}, {LABELS[system]}",
        checks=_checks(found[system], found[DDP]) if system.startswith("coarse") else (),
        note=_words(found[system]),
        kind=MEASURED,
    )


def _checks(ours: Trial | None, ddp: Trial | None) -> tuple[Check, ...]:
    """Batch and speed as multiples of DDP's; nothing if DDP does not fit at all."""
    if ddp is None:
        return ()
    if ours is None:
        return judge_number(BATCH, 0), judge_number(SPEED, 0)
    speed = NumberCheck(expectation=SPEED, measured=ours.speedup(ddp))
    return judge_number(BATCH, ours.batch / ddp.batch), speed


def _words(trial: Trial | None) -> str:
    if trial is None:
        return "not even 1"
    return f"{trial.batch} per worker, {trial.samples_per_s:.2f} samples/s"


def _env() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(FOLDER.parent), os.environ.get("PYTHONPATH")))),
    }


def draw(case: Case, found: dict[str, Trial | None]) -> Figure:
    """A bar chart of samples per second of each system, with its batch."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(
        [LABELS[system] for system in found],
        [trial.samples_per_s if trial else 0 for trial in found.values()],
        color=[COLOURS[system.startswith("coarse")] for system in found],
    )
    axes.bar_label(
        bars, [f"batch {trial.batch}" if trial else "does not fit" for trial in found.values()], padding=3
    )
    axes.invert_yaxis()
    axes.set_xlabel("samples per second, all workers")
    axes.margins(x=0.2)
    figure.suptitle(
        f"Largest batch in {case.limit_bytes / 2**30:.1f} GiB, {case.model} ({MEASURED})", fontsize=11
    )
    return figure


EXPERIMENT = Experiment(
    name="fig16_largest_batch",
    figure="Fig 16",
    machines=("host",),
    assumption="a limit of memory that stands for a GPU's",
    minutes=15,
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))

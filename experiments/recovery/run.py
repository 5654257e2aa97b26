"""Recovery: training that is killed five times against undisturbed training, and the time to resume.

`examples/torch_bert_squad.py` on its small data, with two workers. A random worker receives SIGKILL at a random
moment of each attempt. `coarse run` restarts all workers, which resume from the memory devices or from checkpoints.
Real processes on this machine.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coarse.profiler.profile import MEASURED
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.expectation import AIM, CategoryCheck, Expectation, Measured, NumberCheck, judge_number
from experiments.quiet import MOST_BUSY, measure_in_quiet

NUM_WORKERS = 2
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "torch_bert_squad.py"
KEPT = ("--keep-devices", "60")
LONGEST_LIFE_S = 2.0
"""Longest time from a worker's first step until it is killed."""

_STEP = re.compile(r"step (\d+)/(\d+) loss")
_RESTART = re.compile(r"restart (\d+) of")

MOST_LOST = Expectation(
    what="lost from memory", low=0, high=100, unit="% of that from checkpoints", source=AIM
)
MOST_STATE = Expectation(what="from memory", low=0, high=10, unit="% of the time of torch.load", source=AIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job from its first start until its end.

    Args:
        param_hash: Hash of the final parameters, the same on all workers.
        resumed_at: The first step that each attempt after the first one printed.
        lost_s: The time from each kill until a new step is printed: the end of the other worker, the start of new
            workers, registration, loading the state, and repeated steps. A kill before that step adds to the time of
            the kill before it.
        seconds: Total duration.
    """

    param_hash: str
    resumed_at: tuple[int, ...]
    lost_s: tuple[float, ...]
    seconds: float


def run_job(parent: Path, *, epochs: int, kills: int, seed: int, options: Sequence[str], kept: bool) -> Run:
    """Runs the example in a new folder, and kills a worker in each of its first attempts."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    report = folder / "report.json"
    command = [sys.executable, "-m", "coarse", "run", "-n", str(NUM_WORKERS), "--max-restarts", str(kills)]
    command += [
        *(KEPT if kept else ()),
        str(SCRIPT),
        "--epochs",
        str(epochs),
        "--report",
        str(report),
        *options,
    ]
    chance = random.Random(seed)
    begun = time.monotonic()
    resumed_at: list[int] = []
    is_fresh, num_killed, lines = True, 0, []
    last_step, killed_at, lost_s = 0, 0.0, list[float]()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment(), cwd=folder
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            is_fresh |= _RESTART.search(line) is not None
            step = _STEP.search(line)
            if step is None:
                continue
            if killed_at and len(resumed_at) + is_fresh == num_killed and int(step[1]) > last_step:
                lost_s.append(time.monotonic() - killed_at)
                killed_at = 0.0
            last_step = max(last_step, int(step[1]))
            if not is_fresh:
                continue
            is_fresh = False
            if num_killed:
                resumed_at.append(int(step[1]))
            if num_killed < kills:
                time.sleep(chance.uniform(0.0, LONGEST_LIFE_S))  # the random moment
                os.kill(chance.choice(_worker_pids(report)), signal.SIGKILL)
                killed_at = killed_at or time.monotonic()
                num_killed += 1
    if job.returncode != 0:
        raise RuntimeError("".join(lines[-40:]))
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("report-*.json"))]
    (param_hash,) = {each["param_hash"] for each in reports}
    seconds = time.monotonic() - begun
    return Run(param_hash=param_hash, resumed_at=tuple(resumed_at), lost_s=tuple(lost_s), seconds=seconds)


def time_recovery(parent: Path) -> dict[str, float]:
    """Seconds to restore from memory and from a file, of the slower and of the faster worker, and the file's size."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    command = [sys.executable, "-m", "coarse", "run", "-n", str(NUM_WORKERS), "--max-restarts", "1", *KEPT]
    command += ["-m", "experiments.recovery.timing", str(folder)]
    subprocess.run(
        command, check=True, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    times = [json.loads(path.read_text()) for path in folder.glob("times-*.json")]
    found = {name: max(each[name] for each in times) for name in times[0]}
    found |= {f"least_{name}": min(each[name] for each in times) for name in ("recover_s", "load_s")}
    fresh = [json.loads(path.read_text()) for path in folder.glob("fresh-*.json")]
    return {**found, "fresh_construct_s": max(fresh)}


def run(options: Options) -> Outcome:
    """Runs all cases, one after the other.

    Raises:
        BusyMachineError: If other work takes the processors in each attempt, unless it is a quick run.
    """
    epochs, kills = (8, 2) if options.is_quick else (60, 5)
    most_busy = math.inf if options.is_quick else MOST_BUSY

    def train(what: str, *, kills: int, seed: int, save_every: int = 0, kept: bool = False) -> Run:
        options.progress(what)
        saves = ("--checkpoint-every", str(save_every)) if save_every else ()
        job = partial(run_job, folder, epochs=epochs, kills=kills, seed=seed, kept=kept)
        return measure_in_quiet(
            what, lambda: job(options=("--offload-optimizer", *saves)), most_busy=most_busy
        )

    with tempfile.TemporaryDirectory(prefix="coarse-recovery-") as temporary:
        folder = Path(temporary)
        whole = train("undisturbed", kills=0, seed=0)
        memory = train(f"killed {kills} times, from memory", kills=kills, seed=1, save_every=50, kept=True)
        disk = train(f"killed {kills} times, from checkpoints", kills=kills, seed=2, save_every=5)
        options.progress("time of a recovery")
        times = measure_in_quiet("time of a recovery", lambda: time_recovery(folder), most_busy=most_busy)
    findings = [
        _equality("from memory", memory, whole, kills),
        _equality("from checkpoints, every 5 steps", disk, whole, kills),
        _lost_time(memory, disk),
        _state_alone(times),
    ]
    data: list[dict[str, Any]] = [
        {"kind": MEASURED, "run": name, **asdict(each)}
        for name, each in (("whole", whole), ("memory", memory), ("checkpoints", disk))
    ]
    return Outcome(findings=findings, data=[*data, {"kind": MEASURED, "run": "times", **times}])


def _equality(how: str, found: Run, whole: Run, kills: int) -> Finding:
    equality = "equal" if found.param_hash == whole.param_hash else "different"
    steps = ", ".join(map(str, found.resumed_at))
    resumed = Expectation(what="went on", low=kills, high=kills, unit=" times", source=AIM)
    return Finding(
        ran=f"BERT-tiny, {NUM_WORKERS} workers, SIGKILL at {kills} random moments, {how}",
        checks=(
            CategoryCheck(
                what="parameters and those of an undisturbed run, bitwise:",
                category="equal",
                categories=(equality,),
                source=AIM,
            ),
            judge_number(resumed, len(found.resumed_at)),
        ),
        note=f"at steps {steps}; {found.seconds:.0f} s, undisturbed {whole.seconds:.0f} s",
        kind=MEASURED,
    )


def _lost_time(memory: Run, disk: Run) -> Finding:
    """The range is that of single kills, whose moments are random."""
    ours, theirs = (_mean_of(run.lost_s) for run in (memory, disk))
    return Finding(
        ran="from a kill until the job is further than before, per kill: from memory and from checkpoints",
        checks=(NumberCheck(expectation=MOST_LOST, measured=ours.over(theirs).times(100)),),
        note=f"{ours.value:.1f} s beside {theirs.value:.1f} s",
        kind=MEASURED,
    )


def _mean_of(seconds: Sequence[float]) -> Measured:
    return Measured(value=statistics.mean(seconds), low=min(seconds), high=max(seconds))


def _state_alone(times: dict[str, float]) -> Finding:
    """The range is that of both workers."""
    ours, theirs = (
        Measured(value=times[name], low=times[f"least_{name}"], high=times[name])
        for name in ("recover_s", "load_s")
    )
    return Finding(
        ran=f"of that, {times['state_bytes'] / 2**20:.0f} MiB of parameters and AdamW state alone, from memory and "
        "by torch.load",
        checks=(NumberCheck(expectation=MOST_STATE, measured=ours.over(theirs).times(100)),),
        note=f"{1e3 * times['recover_s']:.1f} ms beside {1e3 * times['load_s']:.0f} ms; registering, "
        f"which both do, {1e3 * times['construct_s']:.0f} ms (with new memory "
        f"{1e3 * times['fresh_construct_s']:.0f} ms)",
        kind=MEASURED,
    )


def _worker_pids(report: Path) -> list[int]:
    """The example's workers: processes with its command line and a rank."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            has_report = str(report).encode() in (process / "cmdline").read_bytes().split(b"\0")
            is_worker = b"\0RANK=" in (process / "environ").read_bytes()
        except OSError:
            continue
        if has_report and is_worker:
            found.append(int(process.name))
    return found


def _environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


EXPERIMENT = Experiment(
    name="recovery",
    figure="Recovery",
    machines=("host",),
    assumption="this machine's processors and disk",
    minutes=6,
    run=run,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))

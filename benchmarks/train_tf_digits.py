"""`make train-tf`: trains the digits with Keras in COARSE workers and in a single process, and compares them.

Each worker uses one thread; the single process uses as many threads as the other run has workers. Every figure is
measured. The exit code is 1 if a run fails, if the accuracy is too low, or if the workers' final weights differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coarse.bench.harness.job_memory import JobMemory

ROOT = Path(__file__).resolve().parent.parent
TITLES = {"coarse": "COARSE", "plain": "one process"}
SCRIPTS = {"coarse": "tf_digits.py", "plain": "tf_digits_plain.py"}


class RunFailedError(Exception):
    """A training run failed; the message ends with its output."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both, shows the table, writes the summary; returns the exit code."""
    options = read_options(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    try:
        summary = {kind: measure(kind, options, console) for kind in TITLES}
    except RunFailedError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    (options.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(table_of(summary, options.workers))
    faults = faults_of(summary, options.min_accuracy)
    for fault in faults:
        console.print(f"FAILED: {fault}", style="bold red", highlight=False)
    return 1 if faults else 0


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains the digits with Keras, under COARSE and in one process."
    )
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "train-tf")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-devices", type=int, default=2)
    parser.add_argument("--min-accuracy", type=float, default=0.97)
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS", help="for each of the two runs"
    )
    parser.add_argument("script_arguments", nargs="*", help="after --: arguments of the training scripts")
    return parser.parse_args(arguments)


def command_of(kind: str, options: argparse.Namespace) -> list[str]:
    """The command line of a run."""
    script = [str(ROOT / "examples" / SCRIPTS[kind]), "--report", str(options.output / kind)]
    if kind == "plain":
        return [sys.executable, *script, "--threads", str(options.workers), *options.script_arguments]
    devices = ["--memory-devices", str(options.memory_devices)]
    launcher = [sys.executable, "-m", "coarse", "run", "-n", str(options.workers), *devices]
    return [*launcher, *script, "--threads", "1", *options.script_arguments]


def measure(kind: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Trains once and returns the reported figures.

    Raises:
        RunFailedError: If the run fails or exceeds the time limit.
    """
    console.print(f"{TITLES[kind]}: training", highlight=False)
    num_reports = 1 if kind == "plain" else options.workers
    paths = [options.output / f"{kind}-{rank}.json" for rank in range(num_reports)]
    for path in paths:
        path.unlink(missing_ok=True)  # prevents reading an earlier run's report
    log = options.output / f"{kind}.log"
    with log.open("wb") as output, JobMemory() as memory:
        process = subprocess.Popen(
            memory.command(command_of(kind, options)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", **os.environ},
        )
        try:
            code = process.wait(options.limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait()
    if code != 0 or not all(path.exists() for path in paths):
        raise RunFailedError(
            f"{log.read_text(errors='replace')}\nFAILED: {TITLES[kind]} ended with exit code {code}"
        )
    reports = [json.loads(path.read_text()) for path in paths]
    return {
        "accuracy": min(report["accuracy"] for report in reports),
        "step_ms_p50": max(report["step_ms_p50"] for report in reports),
        "samples_per_s": min(report["samples_per_s"] for report in reports),
        "peak_mib": memory.peak_bytes / 2**20,
        "weights": [report["weights"] for report in reports],
    }


def table_of(summary: dict[str, dict[str, Any]], num_workers: int) -> Table:
    """Table of both runs' figures."""
    table = Table(title=f"Keras, digits: {num_workers} workers and one process (measured)")
    table.add_column("")
    for kind in summary:
        table.add_column(TITLES[kind], justify="right")
    rows = {
        "test accuracy": lambda entry: f"{100 * entry['accuracy']:.2f} %",
        "samples/s, all workers": lambda entry: f"{entry['samples_per_s']:.0f}",
        "step p50": lambda entry: f"{entry['step_ms_p50']:.1f} ms",
        "peak memory of the whole job": lambda entry: f"{entry['peak_mib']:.0f} MiB",
    }
    for name, show in rows.items():
        table.add_row(name, *(show(entry) for entry in summary.values()))
    return table


def faults_of(summary: dict[str, dict[str, Any]], min_accuracy: float) -> list[str]:
    """Messages for all faults of the results."""
    faults = [
        f"{TITLES[kind]}: accuracy {entry['accuracy']:.3f} is below {min_accuracy}"
        for kind, entry in summary.items()
        if entry["accuracy"] < min_accuracy
    ]
    if len(set(summary["coarse"]["weights"])) > 1:
        faults.append("COARSE: workers ended with different weights")
    return faults


if __name__ == "__main__":
    sys.exit(main())

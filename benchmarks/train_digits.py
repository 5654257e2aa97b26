"""`make train`: trains the digits with COARSE and with torch DDP under one launcher and compares them.

    benchmarks/train_digits.py ──► coarse run ──► worker 0, worker 1 ──► report-0.json, report-1.json
          │  memory, progress                        (memory devices)                │
          └──────────────────────────────◄──────────────────────────────────────────┘
               table, summary.json

Every figure is measured. The exit code is 1 if a run fails, if the accuracy is too low, or if the final parameters
differ between the workers of a run or between the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from coarse.bench.harness.job_memory import JobMemory

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"coarse": "torch_digits.py", "ddp": "torch_digits_ddp.py"}
TITLES = {"coarse": "COARSE", "ddp": "torch DDP (gloo)"}
PROGRESS_LINE = re.compile(r"\bstep (\d+)/(\d+)")
LINES_SHOWN_OF_A_FAILURE = 60
GRACE_S = 10.0


class RunFailedError(Exception):
    """A training run failed; the message ends with its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The runs, and the output folder. Both scripts receive `script_arguments`."""

    output: Path
    num_workers: int
    num_memory_devices: int
    limit_s: float
    script_arguments: Sequence[str] = ()

    def command(self, strategy: str) -> list[str]:
        """Command line for training with `strategy`."""
        return [
            *(sys.executable, "-m", "coarse", "run", "-n", str(self.num_workers)),
            *("--memory-devices", str(self.num_memory_devices)),
            *(str(ROOT / "examples" / SCRIPTS[strategy]), "--report", str(self.output / f"{strategy}.json")),
            *self.script_arguments,
        ]

    def report(self, strategy: str, rank: int) -> Path:
        """File for the measurements of worker `rank`."""
        return self.output / f"{strategy}-{rank}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both strategies, shows the table, writes the summary; returns the exit code."""
    options = read_options(arguments)
    plan = Plan(
        output=options.output,
        num_workers=options.workers,
        num_memory_devices=options.memory_devices,
        limit_s=options.limit,
        script_arguments=options.script_arguments,
    )
    console = Console()
    try:
        turns = [
            {strategy: measure(strategy, plan, console) for strategy in SCRIPTS}
            for _ in range(options.rounds)
        ]
    except RunFailedError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    summary = {strategy: merged([turn[strategy] for turn in turns]) for strategy in SCRIPTS}
    (plan.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(table_of(summary, plan))
    console.print(f"written to {plan.output / 'summary.json'}", highlight=False)
    faults = faults_of(summary, options.min_accuracy)
    for fault in faults:
        console.print(f"FAILED: {fault}", style="bold red", highlight=False)
    return 1 if faults else 0


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the digits with COARSE and torch DDP and compares.")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "train")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-devices", type=int, default=2)
    parser.add_argument("--min-accuracy", type=float, default=0.97)
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS", help="for each of the two runs"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="turns of each; figures are medians; default: %(default)s"
    )
    parser.add_argument("script_arguments", nargs="*", help="after --: arguments of the training scripts")
    return parser.parse_args(arguments)


def measure(strategy: str, plan: Plan, console: Console) -> dict[str, Any]:
    """Trains once with `strategy` and returns its entry of the summary.

    Raises:
        RunFailedError: If the run fails, exceeds the time limit, or lacks a worker's report.
    """
    plan.output.mkdir(parents=True, exist_ok=True)
    for rank in range(plan.num_workers):
        plan.report(strategy, rank).unlink(missing_ok=True)  # prevents reading an earlier run's report
    peak_mib = run(strategy, plan, console)
    reports = []
    for rank in range(plan.num_workers):
        try:
            reports.append(json.loads(plan.report(strategy, rank).read_text()))
        except (OSError, ValueError) as error:
            raise RunFailedError(f"{TITLES[strategy]}: worker {rank} left no report: {error}") from None
    return entry_of(reports, peak_mib)


def run(strategy: str, plan: Plan, console: Console) -> float:
    """Runs the training under `coarse run` with a progress bar; returns the peak memory in MiB."""
    lines: list[str] = []
    began_at = time.monotonic()
    with JobMemory() as memory:
        process = subprocess.Popen(
            memory.command(plan.command(strategy)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        deadline = threading.Timer(plan.limit_s, end, [process])
        deadline.start()
        try:
            show_progress(process, TITLES[strategy], lines, console)
            process.wait()
        finally:
            deadline.cancel()
            end(process)
            (plan.output / f"{strategy}.log").write_text("".join(lines))
    if process.returncode != 0:
        how = (
            f"took more than {plan.limit_s:g} s"
            if time.monotonic() - began_at >= plan.limit_s
            else f"ended with exit code {process.returncode}"
        )
        shown = "".join(lines[-LINES_SHOWN_OF_A_FAILURE:])
        raise RunFailedError(f"{shown}FAILED: the {TITLES[strategy]} run {how}; its output is above")
    return memory.peak_bytes / 2**20


def end(process: subprocess.Popen[str]) -> None:
    """Ends the launcher, which ends its workers; kills the whole session if it does not end."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def show_progress(process: subprocess.Popen[str], title: str, lines: list[str], console: Console) -> None:
    """Reads the run's output into `lines` until it ends; shows the steps as a progress bar."""
    assert process.stdout is not None
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[last]}"), console=console) as bar:
        task = bar.add_task(title, total=None, last="starting")
        for line in process.stdout:
            lines.append(line)
            if found := PROGRESS_LINE.search(line):
                bar.update(
                    task, completed=int(found[1]), total=int(found[2]), last=line[found.end() :].strip()
                )


def entry_of(reports: Sequence[Mapping[str, Any]], peak_mib: float) -> dict[str, Any]:
    """One strategy's summary: total throughput of all workers, and times as the mean over workers."""
    return {
        "accuracy": min(report["accuracy"] for report in reports),
        "samples_per_s": sum(report["samples_per_s"] for report in reports),
        "step_ms_p50": statistics.mean(report["step_ms_p50"] for report in reports),
        "blocked_ms_p50": statistics.mean(report["blocked_ms_p50"] for report in reports),
        "peak_mib": peak_mib,
        "param_hashes": [report["param_hash"] for report in reports],
    }


def merged(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One strategy's summary of all its turns: the worst accuracy, median times, each worker's parameter hash.

    If a worker's turns ended with different parameters, their hashes are joined.
    """
    of_workers = zip(*(turn["param_hashes"] for turn in turns), strict=True)
    return {
        "accuracy": min(turn["accuracy"] for turn in turns),
        "param_hashes": ["/".join(dict.fromkeys(hashes)) for hashes in of_workers],
        **{
            name: statistics.median(turn[name] for turn in turns)
            for name in turns[0]
            if name not in ("accuracy", "param_hashes")
        },
    }


def faults_of(summary: Mapping[str, Mapping[str, Any]], min_accuracy: float) -> list[str]:
    """Messages for all faults of the results."""
    faults = []
    for strategy, entry in summary.items():
        accuracy = entry["accuracy"]
        if accuracy < min_accuracy:
            faults.append(f"{TITLES[strategy]}: test accuracy {accuracy:.2%}, {min_accuracy:.0%} needed")
        if len(set(entry["param_hashes"])) != 1:
            faults.append(f"{TITLES[strategy]}: the workers ended up with different parameters")
    # A sum of two numbers has one result. For more numbers, gloo adds in another order.
    agreed = [set(each["param_hashes"]) for each in summary.values() if len(each["param_hashes"]) == 2]
    if all(len(each) == 1 for each in agreed) and len(set().union(*agreed)) > 1:
        faults.append(f"{' and '.join(TITLES[each] for each in summary)} ended up with different parameters")
    return faults


def table_of(summary: Mapping[str, Mapping[str, Any]], plan: Plan) -> Table:
    """The comparison as a table with a column for each strategy."""
    cores = len(os.sched_getaffinity(0))
    table = Table(
        title=f"Digits, {plan.num_workers} workers, {plan.num_memory_devices} memory devices for COARSE",
        caption=f"measured on {cores} cores; blocked: a step minus one without communication",
    )
    table.add_column("")
    for strategy in summary:
        table.add_column(TITLES[strategy], justify="right")
    for title, key, form in (
        ("test accuracy", "accuracy", "{:.2%}"),
        ("samples/s, all workers", "samples_per_s", "{:.0f}"),
        ("step time p50, ms", "step_ms_p50", "{:.2f}"),
        ("blocked by communication, ms a step", "blocked_ms_p50", "{:.2f}"),
    ):
        table.add_row(title, *(form.format(entry[key]) for entry in summary.values()))
    for rank in range(plan.num_workers):
        hashes = (entry["param_hashes"][rank][:16] for entry in summary.values())
        table.add_row(f"parameters of worker {rank}, SHA-256", *hashes)
    return table


if __name__ == "__main__":
    sys.exit(main())

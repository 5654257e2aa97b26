"""Runs all checks and benchmarks of COARSE that need a GPU, and compares each figure with its target.

    python benchmarks/gpu_report.py [--only kernels,transfers] [--output runs/gpu]

A part is a program that can also run alone (`--list` shows all parts). Its output goes to OUTPUT/PART.txt and its
figures to OUTPUT/PART.jsonl. The final table covers all parts with results in OUTPUT, also those of earlier calls.
Figures are measured and include commit, machine and GPU. The exit code is 1 if a part of this call failed or missed
a target.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
ON_THE_GPU = {"COARSE_MEMORY_DEVICES": "cuda:0,cuda:0"}
LIMIT_S = 3600

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report; `is_met` is None for a figure without a target."""

    what: str
    measured: str
    aim: str = ""
    is_met: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One program.

    Args:
        name: Name of its files.
        command: A program, or the interpreter's arguments; FILE stands for the file of its figures.
        judge: Turns its figures into findings.
        environment: Its environment variables.
    """

    name: str
    command: Sequence[str]
    judge: Callable[[Sequence[Record]], list[Finding]]
    environment: Mapping[str, str] = field(default_factory=dict)


def at_least(what: str, value: float, least: float, unit: str = "") -> Finding:
    """A figure with a lower limit."""
    return Finding(
        what=what, measured=f"{value:.3g}{unit}", aim=f"at least {least:g}{unit}", is_met=value >= least
    )


def at_most(what: str, value: float, most: float, unit: str = "") -> Finding:
    """A figure with an upper limit."""
    return Finding(
        what=what, measured=f"{value:.3g}{unit}", aim=f"at most {most:g}{unit}", is_met=value <= most
    )


def judge_nothing(_: Sequence[Record]) -> list[Finding]:
    """No findings: for a part that only passes or fails."""
    return []


def judge_kernels(records: Sequence[Record]) -> list[Finding]:
    """Kernels against the fastest copy of the same run; small shards have no target."""
    found = []
    for record in records:
        if record["is_kernel"]:
            percent = 100 * record["of_copy"]
            what = f"{record['case']}, of a copy"
            is_small = "shards of" in record["case"]
            found.append(
                Finding(what=what, measured=f"{percent:.3g} %")
                if is_small
                else at_least(what, percent, 85, " %")
            )
    return found


def judge_transfers(records: Sequence[Record]) -> list[Finding]:
    """Pushes and pulls against pinned copies of the same run, and both directions at once against one."""
    figures = records[-1]
    push, pull = figures["push_gbytes_per_s"], figures["pull_gbytes_per_s"]
    return [
        at_least("push, of a pinned copy", 100 * push / figures["pinned_d2h_gbytes_per_s"], 85, " %"),
        at_least("pull, of a pinned copy", 100 * pull / figures["pinned_h2d_gbytes_per_s"], 85, " %"),
        at_least(
            "push and pull at once, to one of them",
            figures["push_and_pull_gbytes_per_s"] / max(push, pull),
            1.6,
            "x",
        ),
        Finding(
            what="pinned copies both ways, to one of them",
            measured=f"{figures['pinned_both_gbytes_per_s'] / figures['pinned_d2h_gbytes_per_s']:.3g}x",
        ),
    ]


def judge_overhead(records: Sequence[Record]) -> list[Finding]:
    """The CPU time for averaging."""
    return [at_most("the client's time for 25 MB", records[-1]["client_us_per_25_mb"], 50, " us")]


def judge_reductions(records: Sequence[Record]) -> list[Finding]:
    """A push and a pull of two workers."""
    return [
        Finding(
            what=f"{record['algorithm']}, {record['nbytes'] >> 20} MiB, tensors on the {record['place']}",
            measured=f"{record['p50_us']:.0f} us, {record['gbytes_per_s']:.3g} GB/s",
        )
        for record in records
    ]


def judge_training(records: Sequence[Record]) -> list[Finding]:
    """Steps against torch DDP, and the GPU memory that workers save with the optimizer in the memory devices."""
    by_system = {record["system"]: record for record in records}
    found = []
    for system, record in by_system.items():
        blocked_us = record["blocked_us"]
        blocked = "" if blocked_us is None else f", {blocked_us / 1e3:.3g} ms blocked"
        memory = f"torch {record['peak_gpu_bytes'] >> 20} MiB, GPU {record['used_gpu_bytes'] >> 20} MiB"
        found.append(
            Finding(
                what=f"{record['model']}, {system}",
                measured=f"{record['p50_us'] / 1e3:.4g} ms{blocked}; {memory}",
            )
        )
    if "ddp" in by_system and "coarse" in by_system:
        ratio = by_system["ddp"]["p50_us"] / by_system["coarse"]["p50_us"]
        found.append(at_least("coarse, to torch DDP over gloo", ratio, 1, "x"))
    for system in ("coarse-offload", "coarse-overlap"):
        if "coarse" in by_system and system in by_system:
            found.append(_saved_bytes(by_system["coarse"], by_system[system]))
    return found


def _saved_bytes(kept: Record, offloaded: Record) -> Finding:
    """GPU memory that workers save if the memory devices run the optimizer."""
    saved_bytes = kept["peak_gpu_bytes"] - offloaded["peak_gpu_bytes"]
    num_parameters = kept["bytes"] / 4  # float32
    each = saved_bytes / num_parameters / kept["num_workers"]
    return at_least(f"{offloaded['system']}, saved for each parameter of each worker", each, 8, " B")


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def _coarse(*arguments: str) -> list[str]:
    return _python("-m", "coarse", *arguments)


def _train_step(*arguments: str) -> list[str]:
    plan = ("--batch", "2", "--seq", "384", "--rounds", "1", "--budget", "8", "--offload-optimizer")
    return _coarse(
        "bench", "train-step", "--model", "bert-base", "--device", "cuda:0", *plan, "--json", "FILE"
    )


def _sanitizer(tool: str) -> list[str]:
    return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]


_KERNEL_TESTS = ("-m", "pytest", "-q", "tests/gpu/test_cuda_kernels.py")
_EXAMPLE = ("run", "-n", "2", "--memory-devices", "cuda:0,cuda:0", "examples/torch_digits.py")

PARTS = (
    Part(
        name="kernels", command=_python("benchmarks/cuda_kernels.py", "--json", "FILE"), judge=judge_kernels
    ),
    Part(
        name="transfers",
        command=_coarse("run", "-n", "2", "benchmarks/gpu_transfers.py", "--json", "FILE"),
        judge=judge_transfers,
    ),
    Part(
        name="overhead",
        command=_coarse("run", "-n", "2", "benchmarks/client_overhead.py", "--json", "FILE"),
        judge=judge_overhead,
    ),
    Part(name="digits", command=_coarse(*_EXAMPLE), judge=judge_nothing),
    Part(name="digits-on-gpu", command=_coarse(*_EXAMPLE, "--device", "cuda:0"), judge=judge_nothing),
    Part(name="tests", command=_python("-m", "pytest", "-q", "tests/gpu"), judge=judge_nothing),
    *(
        Part(
            name=f"reductions-{algorithm}",
            command=_python("benchmarks/gpu_devices.py", "--json", "FILE"),
            judge=judge_reductions,
            environment={"COARSE_ALGORITHM": algorithm, "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
        )
        for algorithm in ("direct", "exchange", "ring", "nccl")
    ),
    Part(name="training", command=_train_step(), judge=judge_training),
    Part(name="training-on-gpu", command=_train_step(), judge=judge_training, environment=ON_THE_GPU),
    Part(
        name="training-by-nccl",
        command=_train_step(),
        judge=judge_training,
        environment={"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    ),
    Part(name="links", command=_coarse("profile", "--gpus"), judge=judge_nothing),
    *(
        Part(
            name=tool,
            command=[*_sanitizer(tool), *options, *_python(*_KERNEL_TESTS, "-k", which)],
            judge=judge_nothing,
        )
        for tool, options, which in (
            ("memcheck", (), "not held"),  # which is about time
            ("racecheck", ("--kernel-name", "kernel_substring=measure_"), "measures"),
        )
    ),
)


def run_part(part: Part, output: Path) -> None:
    """Runs a part; writes its output, figures and exit status to `output`."""
    figures = output / f"{part.name}.jsonl"
    figures.unlink(missing_ok=True)
    command = [str(figures) if argument == "FILE" else argument for argument in part.command]
    began_s = time.monotonic()
    ended = {"command": shlex.join(part.command), "returncode": None, "last_line": "", "seconds": 0.0}
    with (output / f"{part.name}.txt").open("w+") as printed:
        if shutil.which(command[0]) is None:
            ended["last_line"] = f"{command[0]} is missing"
        else:
            environment = os.environ | {"PYTHONPATH": str(ROOT)} | part.environment
            try:
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT_S,
                )
                ended["returncode"] = done.returncode
            except subprocess.TimeoutExpired:
                ended["last_line"] = f"not done after {LIMIT_S} s"
        printed.seek(0)
        lines = [line for line in printed.read().splitlines() if line.strip()]
    ended["last_line"] = ended["last_line"] or (lines[-1] if lines else "")
    ended["seconds"] = time.monotonic() - began_s
    (output / f"{part.name}.json").write_text(json.dumps(ended, indent=1) + "\n")


def findings_of(part: Part, output: Path) -> list[Finding]:
    """The findings of a part; [] if it has not run."""
    path = output / f"{part.name}.json"
    if not path.is_file():
        return []
    ended = json.loads(path.read_text())
    is_over = Finding(
        what=f"{part.name} ({ended['seconds']:.0f} s)",
        measured=ended["last_line"][:100],
        aim="exit code 0",
        is_met=ended["returncode"] == 0,
    )
    figures = output / f"{part.name}.jsonl"
    if not is_over.is_met or not figures.is_file():
        return [is_over]
    records = [json.loads(line) for line in figures.read_text().splitlines()]
    return [is_over, *part.judge(records)]


def table_of(findings: Sequence[Finding], gpu: str) -> Table:
    """The report."""
    table = Table(title=f"measured, {gpu}", title_justify="left")
    for column in ("", "measured", "aim", ""):
        table.add_column(column)
    marks = {True: "met", False: "[bold]missed[/bold]", None: ""}
    for finding in findings:
        table.add_row(finding.what, finding.measured, finding.aim, marks[finding.is_met])
    return table


def gpu_name() -> str:
    """Name of the measured GPU; "" without a GPU.

    Another process finds it, because this one must not create a context on the GPU.
    """
    asked = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    return subprocess.run(_python("-c", asked), capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--only", metavar="PARTS", help="some parts, separated by commas")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="a folder (%(default)s)")
    parser.add_argument("--list", action="store_true", help="show the parts, and run none")
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()  # parts run in another folder
    chosen = arguments.only.split(",") if arguments.only else names
    if unknown := set(chosen) - set(names):
        parser.error(f"--only {', '.join(sorted(unknown))}: parts are {', '.join(names)}")
    console = Console()
    if arguments.list:
        for part in PARTS:
            settings = [f"{name}={value}" for name, value in part.environment.items()]
            line = " ".join([f"{part.name:<20}", *settings, shlex.join(part.command)])
            print(line.replace(sys.executable, "python"))
        return 0
    gpu = gpu_name()
    if not gpu:
        print("there is no GPU that PyTorch can use", file=sys.stderr)
        return 1
    arguments.output.mkdir(parents=True, exist_ok=True)
    own = []
    for part in (part for part in PARTS if part.name in chosen):
        with console.status(f"{part.name}: what it prints goes to {arguments.output / part.name}.txt"):
            run_part(part, arguments.output)
        own += findings_of(part, arguments.output)
    console.print(table_of([each for part in PARTS for each in findings_of(part, arguments.output)], gpu))
    return 1 if any(finding.is_met is False for finding in own) else 0


if __name__ == "__main__":
    sys.exit(main())

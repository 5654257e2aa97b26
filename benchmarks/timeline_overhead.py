"""What `--timeline` costs a training step: jobs with and without it, in turns, on this machine.

    python benchmarks/timeline_overhead.py [--model bert-base] [--rounds 5] [--steps 20]

Each job trains the model on two workers, and reports the time of each step of worker 0, warmed up. Jobs alternate, so
that a change of the machine's speed meets both. The figure is the ratio of the medians over all rounds, and the
smallest and the largest ratio of one round; for the time, and for the CPU time of worker 0, which a busy machine
changes less. All figures are measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM_UP = 5


def train(model_name: str, batch: int, sequence: int, steps: int) -> None:
    """A worker: trains, and prints the seconds of its steps, and its CPU time."""
    import torch

    import coarse.torch
    from coarse.bench.models import build_workload

    coarse.torch.init_process_group()
    rank = torch.distributed.get_rank()
    workload = build_workload(model_name, batch=batch, sequence=sequence, rank=rank)
    model = coarse.torch.DistributedDataParallel(workload.module)
    optimizer = coarse.torch.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)
    seconds, cpu_seconds = [], []
    for step in range(WARM_UP + steps):
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        optimizer.zero_grad()
        workload.loss(model, workload.batches[step % len(workload.batches)]).backward()
        optimizer.step()
        seconds.append(time.monotonic() - began_s)
        cpu_seconds.append(time.process_time() - began_cpu_s)
    if rank == 0:
        print(json.dumps([seconds[WARM_UP:], cpu_seconds[WARM_UP:]]))


def run_job(arguments: argparse.Namespace, flags: list[str]) -> list[list[float]]:
    """Runs a job; returns the seconds of worker 0's steps, and its CPU time."""
    own = [f"--{name}={getattr(arguments, name)}" for name in ("model", "batch", "sequence", "steps")]
    command = [sys.executable, "-m", "coarse", "run", "-n", "2", *flags, __file__, "--worker", *own]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[w0] [[")]
    return list(json.loads(line.removeprefix("[w0] ")))


def compare(arguments: argparse.Namespace) -> None:
    """Runs the jobs and prints what they took."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"without": [], "with": ["--timeline", str(Path(folder) / "trace.json.gz")]}
        jobs: dict[str, list[list[list[float]]]] = {name: [] for name in flags}
        for number in range(arguments.rounds):
            order = list(flags) if number % 2 == 0 else list(flags)[::-1]
            for name in order:
                jobs[name].append(run_job(arguments, flags[name]))
    for number, what in enumerate(("time", "CPU time of worker 0")):
        seconds = {name: [job[number] for job in jobs[name]] for name in jobs}
        report(arguments, what, seconds)


def report(arguments: argparse.Namespace, what: str, seconds: dict[str, list[list[float]]]) -> None:
    """Prints the medians of all rounds, and the ratios of each."""
    ratios = [
        statistics.median(recorded) / statistics.median(plain)
        for recorded, plain in zip(seconds["with"], seconds["without"], strict=True)
    ]
    medians = {name: statistics.median(itertools.chain(*each)) for name, each in seconds.items()}
    print(
        f"measured, {arguments.model}, 2 workers, {arguments.rounds} rounds of {arguments.steps} steps, {what}: "
        f"{medians['without'] * 1e3:.1f} ms without, {medians['with'] * 1e3:.1f} ms with the timeline: "
        f"{(medians['with'] / medians['without'] - 1) * 100:+.2f} % "
        f"(rounds: {min(ratios) * 100 - 100:+.2f} to {max(ratios) * 100 - 100:+.2f} %)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bert-base")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.model, arguments.batch, arguments.sequence, arguments.steps)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()

"""Training a large table from which each step looks up a few rows: sparse gradients, whole ones, and torch DDP.

    python benchmarks/sparse_rows.py [--rows N] [--width N] [--touched N] [--steps N] [--json FILE]

Each system trains the same table with Adagrad on the same random lookups, alone. Parameters are compared before times
are reported. Traffic counts the bytes that all workers and memory devices write for a step's gradients: contributions
and means.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import coarse.torch
from coarse.bench.harness.commands import WorkerJob
from coarse.bench.harness.rendezvous import join_process_group
from coarse.bench.harness.worker_pool import WorkerPool, time_for
from coarse.bench.provenance import MEASURED, Provenance, append_records
from coarse.bench.timing import Timing

NUM_WORKERS = 2
NUMBER_BYTES = 8
VALUE_BYTES = 4
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A table of `rows` x `width`, from which each worker looks up `touched` rows in each of `steps`."""

    rows: int
    width: int
    touched: int
    steps: int

    def lookups(self, rank: int, step: int) -> torch.Tensor:
        """Different rows for each worker and step, without repetition."""
        random = np.random.default_rng([rank, step])
        return torch.from_numpy(random.choice(self.rows, self.touched, replace=False))

    def union(self, step: int) -> int:
        """Number of different rows that all workers look up together."""
        return len(set().union(*(self.lookups(rank, step).tolist() for rank in range(NUM_WORKERS))))


SYSTEMS = {
    "coarse, rows, in step()": {"sparse": True, "offload": {}},
    "coarse, rows, in backward": {"sparse": True, "offload": {"overlap": True}},
    "coarse, rows, optimizer on workers": {"sparse": True, "offload": None},
    "coarse, whole, in step()": {"sparse": False, "offload": {}},
    "torch DDP (gloo), rows": {"sparse": True, "offload": None, "torch": True},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--touched", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the records to FILE")
    arguments = parser.parse_args()
    plan = Plan(rows=arguments.rows, width=arguments.width, touched=arguments.touched, steps=arguments.steps)
    results = {system: _run(system, plan) for system in SYSTEMS}
    _check({system: sums for system, (_, sums) in results.items()}, plan)
    records = [
        {
            "bench": "sparse rows",
            "system": system,
            **asdict(plan),
            "traffic_bytes": traffic_bytes(system, plan),
            **Timing.from_seconds(times).in_ms("step"),
        }
        for system, (times, _) in results.items()
    ]
    provenance = Provenance.here()
    print(
        f"{plan.touched} rows each of {NUM_WORKERS} workers, of a table of {plan.rows} x {plan.width}; measured on "
        f"{provenance.machine}"
    )
    print(f"{'system':<38}{'traffic MiB':>12}{'step ms p50':>13}{'min':>9}{'p99':>9}")
    for record in records:
        print(
            f"{record['system']:<38}{record['traffic_bytes'] / 2**20:>12.1f}{record['step_ms']:>13.1f}"
            f"{record['step_min_ms']:>9.1f}{record['step_p99_ms']:>9.1f}"
        )
    if arguments.json is not None:
        append_records(arguments.json, records, provenance, kind=MEASURED)
    return 0


def traffic_bytes(system: str, plan: Plan) -> int:
    """Traffic of one step: all contributions, and each worker's mean unless the memory devices update the table."""
    options = SYSTEMS[system]
    if not options["sparse"]:
        return 2 * NUM_WORKERS * plan.rows * plan.width * VALUE_BYTES
    row_bytes = NUMBER_BYTES + plan.width * VALUE_BYTES
    is_updated_at_once = bool((options["offload"] or {}).get("overlap"))
    num_rows = plan.touched + (0 if is_updated_at_once else plan.union(0))
    return NUM_WORKERS * num_rows * row_bytes


def _run(system: str, plan: Plan) -> tuple[list[float], tuple[float, float]]:
    with WorkerPool(system, SparseCommands, NUM_WORKERS, asdict(plan)) as pool:
        times, sums = pool.ask("train", time_for(plan.steps))[0]
    return times, sums


class SparseCommands:
    """The commands of a worker under one system."""

    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        self._plan = Plan(**job.options)

    def setup(self) -> int:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(self._job.rank), WORLD_SIZE=str(NUM_WORKERS))
        join_process_group(self._job)
        return self._job.rank

    def close(self) -> None:
        dist.destroy_process_group()

    def train(self) -> tuple[list[float], tuple[float, float]]:
        """Seconds of each step, and the sums of the table's values and of their squares."""
        plan, options = self._plan, SYSTEMS[self._job.system]
        torch.manual_seed(0)
        table = torch.nn.Embedding(plan.rows, plan.width, sparse=options["sparse"])
        wrap = (
            torch.nn.parallel.DistributedDataParallel
            if "torch" in options
            else coarse.torch.DistributedDataParallel
        )
        model = wrap(table)
        optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=0.01)
        if options["offload"] is not None:
            optimizer = coarse.torch.DistributedOptimizer(optimizer, model, **options["offload"])
        target = torch.linspace(-1, 1, plan.width)
        times = []
        for step in range(-2, plan.steps):  # two warm-up steps
            lookups = plan.lookups(self._job.rank, step + 2)
            dist.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            ((model(lookups) - target).square().sum() / plan.touched).backward()
            optimizer.step()
            if step >= 0:
                times.append(time.perf_counter() - begin)
        with torch.no_grad():
            values = table.weight.double()
            return times, (float(values.sum()), float(values.square().sum()))


def _check(sums: dict[str, tuple[float, float]], plan: Plan) -> None:
    """Rejects times of systems that did not train the same table."""
    expected = sums["torch DDP (gloo), rows"]
    for system, found in sums.items():
        if not np.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * plan.rows):
            raise RuntimeError(f"{system} trained another table: sums {found}, not {expected}")


if __name__ == "__main__":
    sys.exit(main())

"""Cost of a replica of parameters and optimizer state per step: AdamW in the memory devices without and with one.

    python benchmarks/replica_cost.py [--parameters MILLIONS] [--devices N] [--steps N] [--rounds N] [--json FILE]

Two workers only average gradients and step, so no computation hides the cost. Systems take turns. Their parameters
are compared bit for bit before times are reported.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import coarse.torch
from coarse.bench.harness.commands import WorkerJob
from coarse.bench.harness.rendezvous import join_process_group
from coarse.bench.harness.worker_pool import WorkerPool, time_for
from coarse.bench.provenance import MEASURED, Provenance, append_records
from coarse.bench.timing import Timing

NUM_WORKERS = 2
NUM_TENSORS = 8
SYSTEMS = {
    "no replica": {},
    "devices kept": {"COARSE_KEEP_DEVICES": "60"},
    "devices kept, replica": {"COARSE_KEEP_DEVICES": "60", "COARSE_REPLICAS": "1"},
}


class Model(torch.nn.Module):
    """A model whose parameters receive its inputs as gradients."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList(torch.zeros(num_elements) for _ in range(NUM_TENSORS))

    def forward(self, *gradients: torch.Tensor) -> torch.Tensor:
        products = [(p * g).sum() for p, g in zip(self.tensors, gradients, strict=True)]
        return torch.stack(products).sum()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=10.0, metavar="MILLIONS")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="how often each system has its turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the records to FILE")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    digests = set()
    for _ in range(arguments.rounds):
        for system in SYSTEMS:
            seconds, digest = _run(system, arguments)
            times[system] += seconds
            digests.add(digest)
    if len(digests) > 1:
        raise RuntimeError(f"replicas change what is trained: {len(digests)} results")
    records = [
        {
            "bench": "replica cost",
            "system": system,
            "parameters": round(arguments.parameters * 1e6),
            "devices": arguments.devices,
            **Timing.from_seconds(seconds).in_ms("step"),
        }
        for system, seconds in times.items()
    ]
    provenance = Provenance.here()
    print(
        f"optimizer.step() of AdamW on {arguments.parameters:g}M float32 parameters, {NUM_WORKERS} workers, "
        f"{arguments.devices} memory devices; measured on {provenance.machine}"
    )
    print(f"{'system':<28}{'step ms p50':>12}{'min':>9}{'p99':>9}")
    for record in records:
        print(
            f"{record['system']:<28}{record['step_ms']:>12.1f}{record['step_min_ms']:>9.1f}{record['step_p99_ms']:>9.1f}"
        )
    if arguments.json is not None:
        append_records(arguments.json, records, provenance, kind=MEASURED)
    return 0


def _run(system: str, arguments: argparse.Namespace) -> tuple[list[float], str]:
    options = {
        "num_elements": round(arguments.parameters * 1e6) // NUM_TENSORS,
        "devices": arguments.devices,
        "steps": arguments.steps,
    }
    with WorkerPool(system, ReplicaCommands, NUM_WORKERS, options) as pool:
        seconds, digest = pool.ask("train", time_for(arguments.steps))[0]
    return seconds, digest


class ReplicaCommands:
    """The commands of a worker under one system."""

    def __init__(self, job: WorkerJob) -> None:
        self._job = job

    def setup(self) -> int:
        torch.set_num_threads(1)
        folder = str(self._job.directory)
        os.environ.update(SYSTEMS[self._job.system], RANK=str(self._job.rank), WORLD_SIZE=str(NUM_WORKERS))
        os.environ.update(COARSE_MEMORY_DEVICES=str(self._job.options["devices"]))
        os.environ.update(TMPDIR=folder, TORCHELASTIC_RUN_ID=folder)  # of the devices that are kept
        tempfile.tempdir = None
        join_process_group(self._job)
        return self._job.rank

    def close(self) -> None:
        dist.destroy_process_group()

    def train(self) -> tuple[list[float], str]:
        """Seconds of each step's optimizer.step(), and the hash of the parameters."""
        num_elements = self._job.options["num_elements"]
        generator = torch.Generator().manual_seed(self._job.rank)
        model = Model(num_elements)
        wrapped = coarse.torch.DistributedDataParallel(model)
        optimizer = coarse.torch.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), wrapped)
        gradients = [torch.randn(num_elements, generator=generator) for _ in range(NUM_TENSORS)]
        seconds = []
        for step in range(-3, self._job.options["steps"]):  # three warm-up steps
            wrapped(*gradients).backward()
            dist.barrier()
            begin = time.perf_counter()
            optimizer.step()
            if step >= 0:
                seconds.append(time.perf_counter() - begin)
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy())
        return seconds, digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())

"""A plain training script, as users write it: a few steps of one system with one batch.

run.py runs it under a memory limit, by `coarse run`. Worker 0 writes the seconds of each step of
the slowest worker to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from coarse.bench.models import build_workload

SEQUENCE = 128


def wrap(system: str, module: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model and its AdamW, set up as each system's documentation recommends."""
    if system.startswith("coarse"):
        import coarse.torch

        model = coarse.torch.DistributedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return model, coarse.torch.DistributedOptimizer(optimizer, model, overlap=system == "coarse-overlap")
    dist.init_process_group("gloo")
    if system == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        for layers in [each for each in module.modules() if isinstance(each, torch.nn.ModuleList)]:
            for layer in layers:
                torch.distributed.fsdp.fully_shard(layer)
        model = torch.distributed.fsdp.fully_shard(module)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains one untimed step, then the timed ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=("ddp", "fsdp", "coarse-offload", "coarse-overlap"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True, help="where worker 0 writes seconds of steps")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    workload = build_workload(arguments.model, batch=arguments.batch, sequence=SEQUENCE, rank=rank)
    model, optimizer = wrap(arguments.system, workload.module)
    seconds = []
    for step in range(arguments.steps + 1):
        began_s = time.perf_counter()
        batch = workload.batches[step % len(workload.batches)]
        workload.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began_s)
    slowest = torch.tensor(seconds[1:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        arguments.report.write_text(json.dumps(slowest.tolist()))


if __name__ == "__main__":
    main()

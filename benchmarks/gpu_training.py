"""A training step of BERT-base on a GPU under COARSE, torch DDP over gloo, or without communication.

    coarse run -n 2 benchmarks/gpu_training.py --system coarse | ddp | none [--batch 2] [--sequence 384]

All workers use the first GPU, which gloo allows and NCCL before 2.30 does not. Worker 0 prints step times, the
processor's time until backward and step() have returned, the peak memory of the GPU, and the parameters' sum, which
is the same for coarse and ddp. Every figure is measured, and carries the GPU's name. Blocked time is the step's less
that of "none".
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import coarse.torch
from coarse.bench.models import MODELS, build_workload

DEVICE = "cuda:0"
WARM_UP = 5
MIB = 1 << 20


def wrap(system: str, module: torch.nn.Module) -> torch.nn.Module:
    # Buffers are constants here; without their broadcast no step has to wait on the processor.
    if system == "coarse":
        return coarse.torch.DistributedDataParallel(module, broadcast_buffers=False)
    if system == "ddp":
        return torch.nn.parallel.DistributedDataParallel(
            module, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=("coarse", "ddp", "none"), default="coarse")
    parser.add_argument("--model", choices=tuple(MODELS), default="bert-base")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=384)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="append a line of results here")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.cuda.set_device(DEVICE)
    workload = build_workload(arguments.model, batch=arguments.batch, sequence=arguments.sequence, rank=rank)
    model = wrap(arguments.system, workload.module.to(DEVICE))
    batches = [{name: value.to(DEVICE) for name, value in each.items()} for each in workload.batches]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(1000 + rank)
    step_s, asked_s = [], []
    for step in range(WARM_UP + arguments.steps):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        workload.loss(model, batches[step % len(batches)]).backward()
        optimizer.step()
        optimizer.zero_grad()
        asked_s.append(time.perf_counter() - began_s)
        torch.cuda.synchronize()
        step_s.append(time.perf_counter() - began_s)
    total = sum(parameter.detach().double().sum() for parameter in model.parameters())
    if rank == 0:
        figures = {
            "step_p50_ms": statistics.median(step_s[WARM_UP:]) * 1e3,
            "step_max_ms": max(step_s[WARM_UP:]) * 1e3,
            "host_p50_ms": statistics.median(asked_s[WARM_UP:]) * 1e3,
            "peak_gpu_mib": torch.cuda.max_memory_allocated() / MIB,
            "parameter_sum": float(total),
        }
        name = torch.cuda.get_device_name()
        print(
            f"measured, {name}, {arguments.system}, {arguments.model}, {arguments.batch} x {arguments.sequence}, "
            f"{dist.get_world_size()} workers on one GPU"
        )
        for figure, value in figures.items():
            print(f"  {figure:16} {value:12.3f}")
        if arguments.json:
            shape = {"batch": arguments.batch, "sequence": arguments.sequence}
            line = {"bench": "gpu-training", "system": arguments.system, "model": arguments.model, **shape}
            with arguments.json.open("a") as out:
                out.write(json.dumps({**line, "gpu": name, "kind": "measured", **figures}) + "\n")


if __name__ == "__main__":
    main()

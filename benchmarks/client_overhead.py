"""The CPU time that averaging gradients costs a worker whose model is on a GPU.

    coarse run -n 2 benchmarks/client_overhead.py [--model bert-base] [--device cuda:0] [--json results.jsonl]

Gradients of the model's shapes arrive one after the other and cost nothing to compute, so a backward pass is mostly
hooks. The client's share is the pass's CPU time minus that of a pass under no_sync(). Averages are verified before
anything is timed. All figures are measured; worker 0 prints and writes its own.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

import coarse.torch
from coarse.bench.models import build_workload
from coarse.bench.provenance import Provenance, append_records

ROUNDS = 60
WARM_UP = 10


class Clock:
    """CPU time of a backward pass in the thread that runs it, from its first gradient to its end."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def begin(self) -> None:
        began_s = time.thread_time()

        def end() -> None:
            self.seconds = time.thread_time() - began_s

        Variable._execution_engine.queue_callback(lambda: Variable._execution_engine.queue_callback(end))


class Give(torch.autograd.Function):
    """Identity whose backward gives a parameter a prepared gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, parameter: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        ctx.given = given
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, passed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return passed, ctx.given.detach(), None


class Begin(torch.autograd.Function):
    """Identity whose backward starts the clock."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, passed: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.begin()
        return passed, None


class Gradients(torch.nn.Module):
    """Parameters of the given shapes, whose gradients cost nothing to compute."""

    def __init__(self, shapes: list[torch.Size], device: str) -> None:
        super().__init__()
        self.clock = Clock()
        self.all = torch.nn.ParameterList(torch.zeros(shape, device=device) for shape in shapes)
        self.given = [torch.zeros(shape, device=device) for shape in shapes]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for parameter, given in zip(self.all, self.given, strict=True):
            value = Give.apply(value, parameter, given)
        return Begin.apply(value, self.clock)


def backward(model: torch.nn.Module, device: str) -> float:
    """Runs one forward and one backward pass; returns the CPU time of the backward pass."""
    for parameter in model.parameters():
        parameter.grad = None
    model(torch.zeros(1, device=device, requires_grad=True)).sum().backward()
    return model.module.clock.seconds


def verify(model: torch.nn.Module, device: str) -> None:
    """Checks that the results are the averages of the workers' gradients."""
    for given in model.module.given:
        given.fill_(dist.get_rank())
    backward(model, device)
    mean = (dist.get_world_size() - 1) / 2
    assert all(bool((parameter.grad == mean).all()) for parameter in model.parameters()), "wrong mean"


def median_seconds(model: torch.nn.Module, device: str, *, averages: bool) -> float:
    """Median CPU time of a backward pass."""
    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier()
        with contextlib.nullcontext() if averages else model.no_sync():
            seconds.append(backward(model, device))
    return statistics.median(seconds[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert-base", help="whose shapes gradients have (%(default)s)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path, help="append a line of results here")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    workload = build_workload(arguments.model, batch=1, sequence=32, rank=0)
    gradients = Gradients([parameter.shape for parameter in workload.module.parameters()], arguments.device)
    model = coarse.torch.DistributedDataParallel(gradients)
    verify(model, arguments.device)
    alone_s = median_seconds(model, arguments.device, averages=False)
    client_s = median_seconds(model, arguments.device, averages=True) - alone_s
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    figures = {
        "parameters": len(gradients.all),
        "mb": num_bytes / 1e6,
        "backward_alone_us": alone_s * 1e6,
        "client_us": client_s * 1e6,
        "client_us_per_25_mb": client_s * 1e6 * 25e6 / num_bytes,
        "client_us_per_parameter": client_s * 1e6 / len(gradients.all),
    }
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name(arguments.device) if arguments.device != "cpu" else "the processor"
        print(f"measured, {name}, {arguments.model}, {dist.get_world_size()} workers")
        for figure, value in figures.items():
            print(f"  {figure:28} {value:12.2f}")
        if arguments.json:
            record = {"bench": "client-overhead", "gpu": name, **figures}
            append_records(arguments.json, [record], Provenance.here())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

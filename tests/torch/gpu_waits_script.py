"""Trains a model with buffers, and counts the CPU's waits in a step on each worker; run by `coarse run`.

The argument "buffers" broadcasts buffers before each forward. The model is on the CPU with the driver of
gpu_stand_in.py, which must be on LD_LIBRARY_PATH.
"""

from __future__ import annotations

import ctypes
import sys

import fast_torch  # noqa: F401, before the next one
import gpu_stand_in
import torch
import torch.distributed as dist
from torch import nn

import coarse.torch
from coarse.client.gpu.gpu_transfers import GpuTransfers
from coarse.client.tensor_group import TensorGroup

NUM_STEPS = 4


def main() -> None:
    gpu_stand_in.install()
    num_waits = ctypes.CDLL("libcuda.so.1").standInWaits
    dist.init_process_group("gloo")
    module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
    model = coarse.torch.DistributedDataParallel(module, broadcast_buffers="buffers" in sys.argv)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    joins = count_calls(GpuTransfers, "join")
    pulls = count_calls(TensorGroup, "pull"), count_calls(TensorGroup, "pull_all")

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()

    step()
    before = num_waits(), len(joins), sum(map(len, pulls))
    for _ in range(NUM_STEPS):
        step()
    after = num_waits(), len(joins), sum(map(len, pulls))
    waits, joined, pulled = (end - begin for begin, end in zip(before, after, strict=True))
    # The stand-in's own: at each join the processor, which computes, waits as a stream would.
    print(f"waited {waits - joined + pulled} times in {NUM_STEPS} steps with {joined} joins", flush=True)


def count_calls(cls: type, name: str) -> list[None]:
    """A list with one entry for each call of a method."""
    method = getattr(cls, name)
    calls: list[None] = []

    def counted(*arguments: object, **named: object) -> object:
        calls.append(None)
        return method(*arguments, **named)

    setattr(cls, name, counted)
    return calls


if __name__ == "__main__":
    main()

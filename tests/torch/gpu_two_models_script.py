"""Trains two models in one backward, which each worker uses in an order of its own; run by `coarse run`.

The models are on the processor behind the driver of gpu_stand_in.py, which must be on LD_LIBRARY_PATH.
"""

from __future__ import annotations

import hashlib
import os

import fast_torch  # noqa: F401, before the next one
import gpu_stand_in
import torch
import torch.distributed as dist
from torch import nn

import coarse.torch

NUM_STEPS = 4


def main() -> None:
    gpu_stand_in.install()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)) for _ in range(2)]
    models = [coarse.torch.DistributedDataParallel(module) for module in modules]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    inputs = torch.randn(NUM_STEPS, 16, 64, generator=torch.Generator().manual_seed(1 + rank))
    for batch in inputs:
        optimizer.zero_grad()
        losses = [model(batch).square().mean() for model in (models if rank == 0 else models[::-1])]
        (losses[0] + losses[1]).backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().numpy())
    print(f"parameters are {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()

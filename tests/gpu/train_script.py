"""A worker that trains a small model and prints the hash of its parameters.

Arguments: a folder for the rendezvous; the device of the model; "offload" to run the optimizer in the memory devices;
"wide" for a model of several pages.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import coarse.torch

NUM_STEPS = 10


def main() -> None:
    folder, device, *options = sys.argv[1:]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    width = 30_000 if "wide" in options else 300
    layers = [nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10)]
    model = coarse.torch.DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if "offload" in options:
        optimizer = coarse.torch.DistributedOptimizer(optimizer, model)
        assert optimizer.runs_in_memory_devices
    inputs = torch.randn(NUM_STEPS, 16, 64, generator=torch.Generator().manual_seed(1 + rank)).to(device)
    for batch in inputs:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy())
    print(json.dumps({"hash": digest.hexdigest()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains a small model for a few steps; the arguments choose how, and how it ends."""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch

import coarse.torch

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=4)
arguments.add_argument("--offload", action="store_true", help="run the optimizer in the memory devices")
arguments.add_argument("--save-to", help="save a checkpoint there after the second step")
arguments.add_argument(
    "--profile", action="store_true", help="print the names that torch's profiler gives the work"
)
arguments.add_argument(
    "--kill", type=int, default=-1, help="rank of a worker that is killed after the last step"
)
arguments.add_argument("--wait", action="store_true", help="wait after the last step until a signal comes")
arguments = arguments.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
model = coarse.torch.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if arguments.offload:
    optimizer = coarse.torch.DistributedOptimizer(optimizer, model)
checkpointer = None
if arguments.save_to:
    from coarse.torch.checkpoint.checkpointer import Checkpointer

    checkpointer = Checkpointer(arguments.save_to, model, optimizer, every=2)
rank = torch.distributed.get_rank()


def train_step():
    optimizer.zero_grad()
    model(torch.ones(4, 64) * (rank + 1)).sum().backward()
    optimizer.step()


for step in range(arguments.steps):
    if arguments.profile and step == 1:
        with torch.profiler.profile() as profile:
            train_step()
        names = {each.name for each in profile.events()}
        print(*sorted(name for name in names if name.startswith("coarse::")), sep="\n")
        continue
    train_step()
    if checkpointer is not None:
        checkpointer.step()
if checkpointer is not None:
    checkpointer.close()
if rank == arguments.kill:
    os.kill(os.getpid(), signal.SIGKILL)
if arguments.kill >= 0:
    train_step()  # fails, because a worker was lost
if arguments.wait:
    print("waiting", flush=True)
    signal.pause()
sys.exit(0)

"""Trains with a global batch of 9 samples, in batches of at most 3, while a worker is lost.

    global_batch_script.py REPORT-FOLDER plain|optimizer|replace

Worker 1 dies by SIGKILL in the forward of its fifth step. With `optimizer`, the optimizer runs in the memory devices,
otherwise on the workers, in float64. With `replace`, a new worker comes, and all end some steps later; otherwise they
end after two epochs.

A line of REPORT-FOLDER/steps-RANK-PID is a step of a worker: its number, the samples of each batch and the sum of the
weighted losses. Each worker that ends normally writes REPORT-FOLDER/end-RANK: the parameters.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import fast_torch  # noqa: F401, before the next one
import torch
from torch import nn
from torch.utils.data import DataLoader

import coarse.torch
from coarse.client.membership.members import WorldChange

NUM_SAMPLES, BATCH, GLOBAL_BATCH, EPOCHS = 102, 3, 9, 2
LOST, LOST_STEP, LAST_STEPS, MANY = 1, 5, 10, 10_000


def dtype_of(mode: str) -> torch.dtype:
    return torch.float32 if mode == "optimizer" else torch.float64


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, the same on all workers."""
    chance = torch.Generator().manual_seed(1)
    values = torch.randn(NUM_SAMPLES, 4, generator=chance, dtype=dtype)
    return values[:, :3], values[:, 3:]


def build_model(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    return module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def parameters_of(module: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    rank, is_new = int(os.environ["RANK"]), "COARSE_INVITATION" in os.environ
    inputs, targets = data(dtype_of(mode))
    module, optimizer = build_model(dtype_of(mode))
    model = coarse.torch.DistributedDataParallel(module)
    if mode == "optimizer":
        optimizer = coarse.torch.DistributedOptimizer(optimizer, model)
    sampler = coarse.torch.ElasticSampler(range(NUM_SAMPLES), model, BATCH, global_batch_size=GLOBAL_BATCH)
    loader = DataLoader(range(NUM_SAMPLES), batch_sampler=sampler)
    session = model.session
    assert session is not None
    step = session.join_training(state={"optimizer": optimizer})
    last = step + 1 + LAST_STEPS if is_new else MANY

    def note_change(change: WorldChange) -> None:
        nonlocal last
        if change.joined:
            last = step + LAST_STEPS

    session.on_change(note_change)
    with (folder / f"steps-{rank}-{os.getpid()}").open("w", buffering=1) as file:
        for _ in sampler.epochs(MANY if mode == "replace" else EPOCHS):
            for batch in loader:
                if sampler.completes_step:
                    step, batches, losses = step + 1, [], 0.0
                if step > last:
                    break
                with sampler.accumulate():
                    loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
                    if (rank, step, is_new) == (LOST, LOST_STEP, False):
                        os.kill(os.getpid(), signal.SIGKILL)
                    weighted = sampler.weighted(loss)
                    weighted.backward()
                batches.append(batch.tolist())
                losses += weighted.item()
                if sampler.completes_step:
                    optimizer.step()
                    optimizer.zero_grad()
                    file.write(json.dumps([step, batches, losses]) + "\n")
                    time.sleep(0.002)
            if step > last:
                break
    (folder / f"end-{rank}").write_text(json.dumps(parameters_of(module)))


if __name__ == "__main__":
    main()

"""Trains a small model with all kinds of state: dropout, batch norm, shuffled data, a scheduler. Run by a launcher.

    recovery_script.py REPORT-FOLDER [bfloat16 | overlap] [stand-in-gpu]

With bfloat16 it trains 16-bit parameters with momentum, instead of float32 ones with AdamW; with overlap parameters
are updated in backward. With stand-in-gpu the CPU stands for a GPU (gpu_stand_in.py).

Each attempt appends its losses to REPORT-FOLDER/losses-RANK, as hexadecimal floats behind step numbers; the last
one writes REPORT-FOLDER/end-RANK: a hash of parameters, buffers and optimizer state, the number of the attempt, and
the step from which it went on.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from pathlib import Path

import fast_torch  # noqa: F401, before the next one
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import coarse.torch

EPOCHS, BATCHES, BATCH = 3, 5, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Dropout(0.3), nn.Linear(300, 4)
        )
        self.register_buffer("mine", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mine += random.random() + np.random.rand()
        return self.layers(inputs) * (1 + 0.1 * self.mine)


def main() -> None:
    folder = Path(sys.argv[1])
    if "stand-in-gpu" in sys.argv[2:]:
        import gpu_stand_in

        gpu_stand_in.install()
    # The process group is COARSE's: torch's own finds addresses of the last attempt in the store of torchrun.
    rank = int(os.environ["RANK"])
    torch.manual_seed(17 + rank)
    random.seed(rank)
    np.random.seed(rank)
    inputs = torch.randn(BATCHES * BATCH, 8, generator=torch.Generator().manual_seed(rank))
    loader = DataLoader(TensorDataset(inputs), batch_size=BATCH, shuffle=True)
    is_narrow = "bfloat16" in sys.argv[2:]
    trained = Model().bfloat16() if is_narrow else Model()
    model = coarse.torch.DistributedDataParallel(trained, forward_sync_buffers=False)
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if is_narrow
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    overlap = "overlap" in sys.argv[2:]
    optimizer = coarse.torch.DistributedOptimizer(optimizer, model, overlap=overlap)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    recovery = coarse.torch.Recovery(model, optimizer, state={"schedule": schedule}, on_resume=schedule.step)
    step = recovery.step
    if step:
        print(f"worker {rank}: from step {step}", flush=True)
    with open(folder / f"losses-{rank}", "a") as losses:
        for _ in recovery.epochs(EPOCHS):
            for (batch,) in recovery.batches(loader):
                optimizer.zero_grad()
                loss = model(batch.bfloat16() if is_narrow else batch).square().mean()
                step += 1
                print(step, loss.item().hex(), file=losses, flush=True)
                loss.backward()
                if not overlap:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
    digest = hashlib.sha256()
    for tensor in model.module.state_dict().values():
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    digest.update(str(optimizer.param_groups[0]["lr"]).encode())
    number = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"end-{rank}").write_text(f"{digest.hexdigest()} {number} {recovery.step}")


if __name__ == "__main__":
    main()

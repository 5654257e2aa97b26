"""Worker 0 ends while its last update still waits for worker 1, which continues when worker 0 is about to exit.

    staleness_script.py FOLDER

Run by a launcher, with two workers. FOLDER/end-RANK says that a worker came to its end.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

import fast_torch  # noqa: F401, before the next one
import torch
from torch import nn

import coarse.torch


def train(folder: Path, rank: int) -> None:
    torch.manual_seed(0)
    model = coarse.torch.DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = coarse.torch.DistributedOptimizer(optimizer, model, staleness=1, overlap=True)
    for step in range(4):
        loss = model(torch.full((2, 8), float(rank + step))).square().mean()
        if rank == 1 and step == 3:
            let_the_other_exit(folder)
        loss.backward()
        optimizer.step()
    if rank == 1:
        optimizer.pull()
    (folder / f"end-{rank}").touch()
    if "dropped" not in sys.argv:
        _KEPT.append(model)


_KEPT: list[nn.Module] = []


def let_the_other_exit(folder: Path) -> None:
    """Computes for as long as a worker needs that does not wait."""
    while not (folder / "exiting").exists():
        os.sched_yield()
    matrix = torch.randn(1500, 1500)
    for _ in range(10):
        matrix = torch.tanh(matrix @ matrix)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    train(folder, rank)
    if rank == 0:
        # Runs before what was registered earlier.
        atexit.register((folder / "exiting").touch)


if __name__ == "__main__":
    main()

"""Trains a small model from which a worker leaves after SIGTERM. Run by `coarse run --min-workers`.

    leaving_script.py REPORT-FOLDER plain|backward|overlap|accumulate LEAVER
    leaving_script.py REPORT-FOLDER endless

Worker LEAVER gets SIGTERM in its fourth step, in the middle of backward. The others end a few steps after it has
left. With `plain` and `accumulate`, torch's optimizer runs on the workers; with `accumulate`, each step has three
forwards. With `endless`, nobody leaves; worker 0 says "trains" after a few steps.

Each worker writes REPORT-FOLDER/end-RANK: a hash of parameters and buffers, by step how far a parameter has moved
whose gradient on worker r is 2**r, and the forwards of the step that it was in. Those that stay add the members.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import fast_torch  # noqa: F401, before the next one
import torch
from torch import nn

import coarse.torch

BATCH, LAST_STEPS, MOST_STEPS, FORWARDS = 4, 5, 6_000, 3
FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
LEAVER = int(sys.argv[3]) if len(sys.argv) > 3 else -1
RANK = int(os.environ["RANK"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moved = nn.Parameter(torch.zeros(1))
        self.layers = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs).square().mean() + 2**RANK * self.moved.sum()


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [model.module.moved], "lr": 1.0},
        {"params": list(model.module.layers.parameters())},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    if MODE not in ("backward", "overlap"):
        return optimizer
    return coarse.torch.DistributedOptimizer(optimizer, model, overlap=MODE == "overlap")


def main() -> None:
    torch.manual_seed(RANK)
    model = coarse.torch.DistributedDataParallel(Model())
    optimizer = optimizer_of(model)
    session = model.session
    assert session is not None
    session.join_training(state={"optimizer": optimizer})
    step, num_forwards, last = 0, 0, MOST_STEPS
    moves: dict[int, float] = {}

    def report(**more: object) -> None:
        own = {"digest": digest_of(model.module), "moves": moves, "forwards": num_forwards}
        (FOLDER / f"end-{RANK}").write_text(json.dumps(own | more))

    def be_asked(_: object) -> None:
        if step == 4 and num_forwards == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    if RANK == LEAVER:
        model.module.layers[1].weight.register_post_accumulate_grad_hook(be_asked)
    count = FORWARDS if MODE == "accumulate" else 1
    while step < last:
        step += 1
        before = model.module.moved.item()
        optimizer.zero_grad()
        try:
            for num_forwards in range(count):
                with contextlib.nullcontext() if num_forwards == count - 1 else model.no_sync():
                    (model(torch.randn(BATCH, 8)) / count).backward()
                    time.sleep(0.002)
        except SystemExit:
            report()
            raise
        optimizer.step()
        moves[step] = before - model.module.moved.item()
        if last == MOST_STEPS and RANK != LEAVER and len(session.members) < 3:
            last = step + LAST_STEPS
        if MODE == "endless" and step == 3 and RANK == 0:
            print("trains", flush=True)
    assert step < MOST_STEPS
    model.eval()(torch.randn(BATCH, 8))  # begins with the buffers of one worker, and leaves them so
    report(members=session.members)


if __name__ == "__main__":
    main()

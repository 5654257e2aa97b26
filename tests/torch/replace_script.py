"""Trains a small model while workers are lost and replaced. Run by `coarse run --on-loss replace`.

    replace_script.py REPORT-FOLDER plain|backward|overlap LOST-RANK NUMBER-OF-ENTRIES [FATE...]

Worker LOST-RANK dies by SIGKILL in its fifth step. The n-th new worker has the n-th FATE: `start`, `built` or
`entered` kills it at once, when its model is built, or when it takes part; `step` kills it in its third step; `fail`
lets it raise an error before it has a model; `live` lets it live. The job ends a few steps after NUMBER-OF-ENTRIES
workers have taken part in it.

With `plain`, torch's optimizer runs on the workers, which is refused. Each worker that ends normally writes
REPORT-FOLDER/end-RANK: a hash of parameters, buffers and optimizer state, the members, their changes by step,
and by step how far a parameter has moved whose gradient on worker r is 2**r.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import fast_torch  # noqa: F401, before the next one
import torch
from torch import nn

import coarse.torch

BATCH, LAST_STEPS, MOST_STEPS = 4, 5, 6_000
FOLDER, MODE, LOST, NUM_ENTRIES = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
RANK, IS_NEW = int(os.environ["RANK"]), "COARSE_INVITATION" in os.environ


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moved = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.layers = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs).square().mean() + 2**RANK * self.moved.sum()


def number_of(kind: str) -> int:
    """Counts a call, over all workers of the job, from 1."""
    (FOLDER / f"{kind}-{os.getpid()}").touch()
    return len(list(FOLDER.glob(f"{kind}-*")))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    fates = sys.argv[5:]
    fate = fates[min(number_of("started"), len(fates)) - 1] if IS_NEW and fates else ""
    if fate == "start":
        die()
    if fate == "fail":
        raise ValueError("a worker that cannot start")
    torch.manual_seed(os.getpid())
    model = coarse.torch.DistributedDataParallel(Model())
    groups = [
        {"params": [model.module.moved], "momentum": 0.0},
        {"params": list(model.module.layers.parameters())},
    ]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    optimizer.param_groups[1]["lr"] = 0.01
    if MODE != "plain":
        optimizer = coarse.torch.DistributedOptimizer(optimizer, model, overlap=MODE == "overlap")
        assert optimizer.runs_in_memory_devices
    session = model.session
    assert session is not None
    assert session.is_newcomer == IS_NEW
    if fate == "built":
        die()
    step = first = session.join_training()
    last, num_entries, num_members = MOST_STEPS, 0, len(session.members)
    changes: list[list[int]] = []

    def note_change(members: tuple[int, ...]) -> None:
        nonlocal last, num_entries, num_members
        changes.append([step, *members])
        num_entries += len(members) > num_members
        num_members = len(members)
        if num_entries == NUM_ENTRIES:
            last = step + LAST_STEPS

    session.on_change(note_change)
    if IS_NEW:
        num_entries = number_of("entered")
        if num_entries == NUM_ENTRIES:
            last = step + 1 + LAST_STEPS
    if fate == "entered":
        die()
    moves: dict[int, float] = {}
    while step < last:
        step += 1
        before = model.module.moved.item()
        optimizer.zero_grad()
        loss = model(torch.randn(BATCH, 8))
        if (RANK == LOST and step == 5 and not IS_NEW) or (fate == "step" and step == first + 3):
            model.module.layers[1].weight.register_post_accumulate_grad_hook(lambda _: die())
        loss.backward()
        optimizer.step()
        moves[step] = before - model.module.moved.item()
        time.sleep(0.005)
    assert step < MOST_STEPS
    model.eval()(torch.randn(BATCH, 8))  # begins with the buffers of one worker, and leaves them so
    digest = hashlib.sha256()
    for tensor in model.module.state_dict().values():
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            if value is not None:
                digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    report = {"digest": digest.hexdigest(), "members": session.members, "changes": changes, "moves": moves}
    (FOLDER / f"end-{RANK}").write_text(json.dumps(report))


if __name__ == "__main__":
    main()

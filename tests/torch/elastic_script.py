"""Trains a small model while workers are lost. Run by `coarse run --min-workers`.

    elastic_script.py REPORT-FOLDER plain|optimizer|overlap [die|raise|node RANK]

With `plain`, torch's optimizer runs on the workers; otherwise the memory devices run it. The named worker dies by
SIGKILL in the middle of its fourth backward, or raises an error there; with `node`, all processes with its TMPDIR
die: launcher, workers and memory devices.

Each worker that ends normally writes REPORT-FOLDER/end-RANK: a hash of parameters, buffers and optimizer state, the
members, and their changes: the step, the members before and after.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import fast_torch  # noqa: F401, before the next one
import torch
from torch import nn

import coarse.torch

STEPS, BATCH = 10, 4


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    fate, doomed = (sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 3 else ("", -1)
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    trained = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 4))
    step, changes = 0, []
    model = coarse.torch.DistributedDataParallel(
        trained, on_change=lambda change: changes.append([step, change.old, change.new])
    )
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if mode != "plain":
        optimizer = coarse.torch.DistributedOptimizer(optimizer, model, overlap=mode == "overlap")
        assert optimizer.runs_in_memory_devices
    assert model.session is not None

    def end(parameter: nn.Parameter) -> None:
        if step == 4 and fate == "raise":
            raise ValueError("a batch that cannot be")
        if step == 4 and fate == "node":
            kill_node()
        if step == 4 and fate == "die":
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == doomed:
        trained[1].weight.register_post_accumulate_grad_hook(end)
    while step < STEPS:
        step += 1
        optimizer.zero_grad()
        model(torch.randn(BATCH, 8)).square().mean().backward()
        optimizer.step()
    model.eval()(torch.randn(BATCH, 8))  # begins with the buffers of one worker, and leaves them so
    digest = hashlib.sha256()
    for tensor in model.module.state_dict().values():
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    end_of_this = [digest.hexdigest(), list(model.session.members), changes]
    (folder / f"end-{rank}").write_text(json.dumps(end_of_this))


def kill_node() -> None:
    """SIGKILL of all processes with this one's TMPDIR, this one last."""
    mark = f"TMPDIR={os.environ['TMPDIR']}".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

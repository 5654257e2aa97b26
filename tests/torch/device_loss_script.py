"""Trains a small model with checkpoints; its first attempt loses a memory device. Run by a launcher.

    device_loss_script.py FOLDER DEVICE [overlap]

Memory device DEVICE is killed in step KILLED_IN of attempt 0; -1 kills none. With overlap, devices update in
backward. At the end FOLDER/end-RANK contains a hash of parameters and optimizer state, the number of the attempt,
and its first step.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import fast_torch  # noqa: F401, before the next one
import torch
from torch import nn

import coarse.torch
from coarse.torch.checkpoint import Checkpointer, RandomState

STEPS, EVERY, KILLED_IN = 14, 4, 10


def main() -> None:
    folder, device = Path(sys.argv[1]), int(sys.argv[2])
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(rank)
    model = coarse.torch.DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Dropout(0.3), nn.Linear(300, 4))
    )
    optimizer = coarse.torch.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), model, overlap="overlap" in sys.argv[3:]
    )
    state = {"random": RandomState()}
    with Checkpointer(folder / "checkpoints", model, optimizer, every=EVERY, state=state) as checkpointer:
        first = checkpointer.restore()
        for step in range(first + 1, STEPS + 1):
            if (attempt, rank, step) == (0, 0, KILLED_IN) and device >= 0:
                checkpointer.wait()
                os.kill(model.session.device_pids[device], signal.SIGKILL)
            optimizer.zero_grad()
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))
            model(inputs).square().mean().backward()
            optimizer.step()
            checkpointer.step()
    digest = hashlib.sha256()
    for tensor in model.module.state_dict().values():
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    for values in optimizer.state_dict()["state"].values():
        for value in values.values():
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    (folder / f"end-{rank}").write_text(f"{digest.hexdigest()} {attempt} {first}")


if __name__ == "__main__":
    main()

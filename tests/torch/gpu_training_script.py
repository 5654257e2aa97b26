"""Trains a small model on a worker with a GPU, and writes a hash of its parameters; run by `coarse run`.

    gpu_training_script.py FOLDER [GPU,... [LINKS]]

Worker i uses the i-th of the GPUs, those of the stand-in, which must be on LD_LIBRARY_PATH. Without GPUs it uses the
CPU. STAND_IN_LINKS becomes LINKS after the first step. FOLDER/end-RANK contains a hash of the parameters, and the
class of the gradients' path; FOLDER/decisions-RANK the session's decisions.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from pathlib import Path

import fast_torch  # noqa: F401, before the next one
import torch
import torch.distributed as dist
from torch import nn

import coarse.torch

STEPS = 4
WIDTH = 300


def main() -> None:
    folder, gpus, links = Path(sys.argv[1]), sys.argv[2:3], sys.argv[3:]
    rank = int(os.environ["RANK"])
    logging.basicConfig(format="%(message)s")
    torch.set_num_threads(1)
    if gpus:
        import gpu_stand_in

        gpu_stand_in.install(int(gpus[0].split(",")[rank]))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    model = coarse.torch.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(STEPS, 16, 64, generator=torch.Generator().manual_seed(1 + rank))
    for batch in inputs:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if links:
            os.environ["STAND_IN_LINKS"] = links[0]
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy())
    (folder / f"end-{rank}").write_text(f"{digest.hexdigest()} {type(model._gradients.rest._path).__name__}")
    (folder / f"decisions-{rank}").write_text("\n".join(model.session.decisions()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

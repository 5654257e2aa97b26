"""One of two workers, which times how it restores its state from memory devices and from a file.

experiments.recovery.run runs it under `coarse run --max-restarts 1 --keep-devices 60 -m experiments.recovery.timing
FOLDER`. The first attempt trains two steps and saves a file; then worker 1 kills itself. The second attempt writes
FOLDER/times-RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import coarse.torch
from coarse.torch.process_group import current_process_group

WIDTH, LAYERS = 2048, 6
"""25 million parameters: 96 MiB, and 192 MiB of AdamW's state."""


def main() -> None:
    folder = Path(sys.argv[1])
    path = folder / "state.pt"
    current_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = coarse.torch.DistributedDataParallel(module)
    dist.barrier()
    begun = time.perf_counter()
    bare = torch.optim.AdamW(model.parameters())
    optimizer = coarse.torch.DistributedOptimizer(bare, model)
    constructed = time.perf_counter()
    recovery = coarse.torch.Recovery(model, optimizer)
    recovered = time.perf_counter()
    if not recovery.step:
        _train_and_save(model, optimizer, path, folder, constructed - begun)
    memory = [value.clone() for value in module.state_dict().values()]
    dist.barrier()
    began_loading = time.perf_counter()
    saved = torch.load(path, weights_only=True)
    module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loaded = time.perf_counter()
    assert all(map(torch.equal, memory, module.state_dict().values()))
    times = {
        "construct_s": constructed - begun,
        "recover_s": recovered - constructed,
        "load_s": loaded - began_loading,
        "state_bytes": path.stat().st_size,
    }
    (folder / f"times-{rank}.json").write_text(json.dumps(times))


def _train_and_save(model: Any, optimizer: Any, path: Path, folder: Path, construct_s: float) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(1, WIDTH)).square().mean().backward()
        optimizer.step()
    state = optimizer.state_dict()
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": state}, path)
    (folder / f"fresh-{dist.get_rank()}.json").write_text(json.dumps(construct_s))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()  # fails when worker 1 is lost


if __name__ == "__main__":
    main()

"""Trains with a checkpoint, reports metrics to TensorBoard, and scrapes its own node. Run by a launcher.

    metrics_script.py FOLDER [crash] [local]

Worker 0 writes FOLDER/metrics.json: what it scraped, what Session.metrics() gave, and what a function was told. With
`crash`, worker 1 kills itself in the first attempt; with `local`, the optimizer runs in the workers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

import fast_torch  # noqa: F401, before the next one
import torch
from torch import nn

import coarse.torch
from coarse.torch.checkpoint import Checkpointer

STEPS, BATCH = 8, 4


def scrape() -> str:
    url = f"http://127.0.0.1:{os.environ['COARSE_METRICS_PORT']}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def main() -> None:
    folder = Path(sys.argv[1])
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(rank)
    model = coarse.torch.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    if "local" not in sys.argv:
        optimizer = coarse.torch.DistributedOptimizer(optimizer, model)
    told: list[tuple[str, float, int]] = []
    reporter = model.session.reporter(lambda *scalar: told.append(scalar), every=4)
    writes_events = rank == 0 and "crash" not in sys.argv
    if writes_events:
        from torch.utils.tensorboard import SummaryWriter

        events = SummaryWriter(str(folder / "events"))
        to_events = model.session.reporter(events.add_scalar, every=STEPS)
    with Checkpointer(folder / "checkpoints", model, optimizer, first_step=attempt) as checkpointer:
        for step in range(STEPS):
            if "crash" in sys.argv and (rank, attempt, step) == (1, 0, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            inputs = torch.randn(BATCH, 64)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.session.count_samples(len(inputs))
            reporter.step()
            if writes_events:
                to_events.step()
            checkpointer.step()
        checkpointer.save()
    if writes_events:
        events.close()
    model.session.barrier()
    if rank == 0:
        found = {"scraped": scrape(), "read": dict(model.session.metrics()), "told": told}
        (folder / "metrics.json").write_text(json.dumps(found))
    model.session.barrier()


if __name__ == "__main__":
    main()

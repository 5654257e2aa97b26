"""Trains on the numbers of a dataset's samples, and writes which were trained on, while workers are lost.

    elastic_sampler_script.py REPORT-FOLDER replace|recovery|refused|restart|leave|term NUM-LOADERS [STEP]

`replace` divides samples with an ElasticSampler while worker 1 dies by SIGKILL in the backward of its fifth step, and
a new one takes its place; `recovery` does it by way of Recovery's loops. All end an epoch after that in which the new
worker came. `refused` constructs a Recovery without sampler. `restart` dies alike, when memory devices are kept, and
ends after three epochs. With `leave`, worker 1 leaves as planned when it has the batch of step STEP, and with `term`
some time after a SIGTERM in that step; the others end an epoch later. NUM-LOADERS processes load batches in advance.

A line of REPORT-FOLDER/seen-RANK-PID is a batch: the epoch and the samples. It is written before the step if the
worker may be lost in it, otherwise when the step is over. Each worker that ends normally writes
REPORT-FOLDER/end-RANK: the last epoch.
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
from torch.utils.data import DataLoader, Dataset

import coarse.torch
from coarse.client.membership.members import WorldChange

NUM_SAMPLES, BATCH, LOST, MANY = 500, 4, 1, 10_000
FOLDER, MODE, NUM_LOADERS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
LOST_STEP = int(sys.argv[4]) if len(sys.argv) > 4 else 5
IS_LOST_IN_STEP = MODE in ("replace", "recovery")
RANK, IS_NEW = int(os.environ["RANK"]), "COARSE_INVITATION" in os.environ
IS_FIRST = not IS_NEW and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


class Numbers(Dataset):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> int:
        return number


def main() -> None:
    torch.manual_seed(0)
    model = coarse.torch.DistributedDataParallel(nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    optimizer = coarse.torch.DistributedOptimizer(optimizer, model)
    if MODE == "refused":
        coarse.torch.Recovery(model, optimizer)
    numbers = Numbers()
    sampler = coarse.torch.ElasticSampler(numbers, model, BATCH)
    loader = DataLoader(numbers, batch_sampler=sampler, num_workers=NUM_LOADERS)
    session = model.session
    assert session is not None
    loop = sampler
    if MODE in ("recovery", "restart"):
        loop = coarse.torch.Recovery(model, optimizer, state={"sampler": sampler})
    last_epoch = 2 if MODE == "restart" else MANY

    def note_change(change: WorldChange) -> None:
        nonlocal last_epoch
        if change.joined or MODE in ("leave", "term"):
            last_epoch = sampler.epoch + 1

    session.on_change(note_change)
    if IS_NEW:
        session.join_training()
        last_epoch = sampler.epoch + 1
    step = 0
    with (FOLDER / f"seen-{RANK}-{os.getpid()}").open("w", buffering=1) as seen:
        for epoch in loop.epochs(MANY):
            if epoch > last_epoch:
                break
            for batch in loader if loop is sampler else loop.batches(loader):
                step += 1
                is_last = RANK == LOST and step == LOST_STEP and IS_FIRST
                if is_last and MODE == "leave":
                    session.leave()
                    return
                if is_last and MODE == "term":
                    os.kill(os.getpid(), signal.SIGTERM)
                line = json.dumps([epoch, batch.tolist()]) + "\n"
                if IS_LOST_IN_STEP:
                    seen.write(line)
                optimizer.zero_grad()
                loss = model(batch[:, None].float()).square().mean()
                if is_last and MODE in ("replace", "recovery", "restart"):
                    model.module[1].weight.register_post_accumulate_grad_hook(lambda _: die())
                loss.backward()
                optimizer.step()
                if not IS_LOST_IN_STEP:
                    seen.write(line)
                time.sleep(0.005)
    (FOLDER / f"end-{RANK}").write_text(str(last_epoch))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

"""Trains digits on two nodes of one worker each, and reports what each worker found. Run by `coarse run -n 2`.

    node_compression_script.py FOLDER [offload]

Writes FOLDER/RANK.json. With `offload`, the optimizer runs in the memory devices.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import fast_torch  # noqa: F401, before the next one
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torch_digits import accuracy_of, build_model, load_data, shifted

import coarse.torch

EPOCHS, BATCH = 30, 32


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["COARSE_NODE"] = f"node {os.environ['RANK']}"
    coarse.torch.init_process_group()
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    train_data, test_data = load_data()
    model = coarse.torch.DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if "offload" in sys.argv:
        optimizer = coarse.torch.DistributedOptimizer(optimizer, model)
        assert optimizer.runs_in_memory_devices
    sampler = DistributedSampler(train_data)
    batches = DataLoader(train_data, batch_size=BATCH, sampler=sampler, drop_last=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=EPOCHS * len(batches))
    before = model.session.metrics().total("coarse_node_sent_bytes_total")
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(shifted(images)), labels).backward()
            optimizer.step()
            schedule.step()
    sent = model.session.metrics().total("coarse_node_sent_bytes_total") - before
    steps = EPOCHS * len(batches)
    parameters = list(model.module.state_dict().values())
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in parameters)).hexdigest()
    found = {
        "accuracy": accuracy_of(model.module, test_data),
        "digest": digest,
        "sent_per_gradient_byte": sent / steps / sum(4 * each.numel() for each in parameters),
        "decisions": model.session.decisions(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

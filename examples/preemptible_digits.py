"""Trains the digits of torch_digits.py in jobs that a cluster may preempt: they resume from their newest checkpoint.

How to run it: docs/clusters.md.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import coarse.torch
from coarse.torch.checkpoint import Checkpointer, DataPosition, RandomState
from torch_digits import accuracy_of, build_model, load_data, shifted


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits, with checkpoints.")
    add_training_arguments(parser)
    return parser.parse_args()


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="samples of one step, over all workers")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest rate of the one-cycle schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("runs/checkpoints"), help="folder that all nodes share"
    )
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")


def train(arguments: argparse.Namespace, *, on_signal: bool = True) -> None:
    """Trains in torch's default process group.

    Args:
        arguments: Those of add_training_arguments().
        on_signal: Whether SIGTERM and SIGUSR1 save a checkpoint; needs the main thread.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed + rank)
    train_data, test_data = load_data()
    sampler = DistributedSampler(train_data, seed=arguments.seed)
    batches = DataLoader(train_data, batch_size=max(1, arguments.batch // world_size), sampler=sampler)
    model = coarse.torch.DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    steps = arguments.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=arguments.lr, total_steps=steps)
    position = DataPosition()
    state = {"random": RandomState(), "position": position, "schedule": schedule}
    if on_signal:  # clusters announce the end by SIGTERM
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGUSR1))
    with Checkpointer(
        arguments.checkpoints,
        model,
        optimizer,
        every=arguments.every,
        keep=2,
        state=state,
        on_signal=on_signal,
    ) as checkpointer:
        first_step = checkpointer.restore()
        if rank == 0:
            print(f"begins at step {first_step} of {steps}, with {world_size} workers", flush=True)
        for epoch in position.epochs(arguments.epochs):
            sampler.set_epoch(epoch)
            for images, labels in position.batches(batches):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(shifted(images)), labels).backward()
                optimizer.step()
                schedule.step()
                checkpointer.step()
    if rank == 0:
        print(f"test accuracy {accuracy_of(model.module, test_data):.2%}", flush=True)


def main() -> None:
    arguments = read_arguments()
    coarse.torch.init_process_group()
    train(arguments)


if __name__ == "__main__":
    main()

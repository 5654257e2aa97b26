"""Trains the digits of torch_digits.py with Ray Train: Ray starts the workers, memory devices average gradients.

How to run it: README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import coarse.torch
from torch_digits import accuracy_of, build_model, load_data, shifted


def train(options: dict[str, Any]) -> None:
    """Runs in each of Ray's workers."""
    context = ray.train.get_context()
    torch.manual_seed(context.get_world_rank())
    train_data, test_data = load_data()
    sampler = DistributedSampler(train_data)
    batches = DataLoader(train_data, options["batch"] // context.get_world_size(), sampler=sampler)
    model = coarse.torch.DistributedDataParallel(build_model())  # was: ray.train.torch.prepare_model
    optimizer = torch.optim.AdamW(model.parameters(), lr=options["lr"])
    steps = options["epochs"] * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=options["lr"], total_steps=steps)
    for epoch in range(options["epochs"]):
        sampler.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(shifted(images)), labels).backward()
            optimizer.step()
            schedule.step()
    if context.get_world_rank() == 0:
        print(f"test accuracy {accuracy_of(model.module, test_data):.2%}")
    model.close()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits with Ray Train.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="samples of one step, over all workers")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest rate of the one-cycle schedule")
    parser.add_argument("--results", type=Path, default=Path("runs/ray"), help="folder of Ray's own records")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    here = str(Path(__file__).resolve().parent)
    ray.init(num_cpus=arguments.workers + 1, runtime_env={"env_vars": {"PYTHONPATH": here}})
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": arguments.epochs, "batch": arguments.batch, "lr": arguments.lr},
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        torch_config=TorchConfig(backend="coarse"),  # was: "gloo"
        run_config=RunConfig(storage_path=str(arguments.results.resolve())),
    )
    trainer.fit()


if __name__ == "__main__":
    main()

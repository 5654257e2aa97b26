"""Trains a convolutional network on the 1,797 handwritten digits that scikit-learn ships.

The workers share the digits and average their gradients in every step.
How to run it: README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import coarse.torch
from job import Job, Progress, join_job
from measure import Recorder

TEST_FRACTION = 0.2
SPLIT_SEED = 1797  # the same split for all training seeds, to make accuracies comparable


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits, data-parallel.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="samples of one step, over all workers")
    parser.add_argument(
        "--lr", type=float, default=2e-3, help="highest learning rate of the one-cycle schedule"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, or a GPU such as cuda:0")
    parser.add_argument("--report", type=Path, help="write what each worker measured: FILE-<rank>.json")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The digits as 1x8x8 images in 0..1, split into training and test samples, the same for every worker."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        range(len(labels)), test_size=TEST_FRACTION, random_state=SPLIT_SEED, stratify=digits.target
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(128 * 4 * 4, 256),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(256, 10),
    )


def shifted(images: torch.Tensor) -> torch.Tensor:
    """The 8x8 images, each moved by up to one pixel along each axis (data augmentation)."""
    windows = nn.functional.pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)
    rows, columns = torch.randint(0, 3, (2, len(images)))
    return windows[torch.arange(len(images)), :, rows, columns]


def train(model: nn.Module, data: TensorDataset, arguments: argparse.Namespace, job: Job) -> Recorder:
    sampler = DistributedSampler(data, seed=arguments.seed)
    batches = DataLoader(data, batch_size=max(1, arguments.batch // job.world_size), sampler=sampler)
    steps = arguments.epochs * len(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=arguments.lr, total_steps=steps)
    recorder = Recorder(job, arguments.report)
    with Progress(job, steps=steps) as progress:
        for epoch in range(arguments.epochs):
            sampler.set_epoch(epoch)
            for images, labels in batches:
                with recorder.step(samples=len(labels)):
                    optimizer.zero_grad()
                    images, labels = shifted(images).to(arguments.device), labels.to(arguments.device)
                    loss = nn.functional.cross_entropy(model(images), labels)
                    loss.backward()
                    optimizer.step()
                    schedule.step()
                progress.advance(loss.item())
    return recorder


@torch.no_grad()
def accuracy_of(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    device = next(model.parameters()).device
    images, labels = (tensor.to(device) for tensor in data.tensors)
    accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return accuracy


def main() -> None:
    arguments = read_arguments()
    with join_job() as job:
        torch.manual_seed(arguments.seed + job.rank)  # different dropout and shifts on every worker
        train_data, test_data = load_data()
        model = build_model().to(arguments.device)
        model = coarse.torch.DistributedDataParallel(model)
        recorder = train(model, train_data, arguments, job)
        accuracy = accuracy_of(model.module, test_data)
        job.say(f"test accuracy {accuracy:.2%}")
        batch = train_data[: max(1, arguments.batch // job.world_size)]
        images, labels = (tensor.to(arguments.device) for tensor in batch)
        recorder.write(model, lambda: nn.functional.cross_entropy(model(images), labels), accuracy=accuracy)


if __name__ == "__main__":
    main()

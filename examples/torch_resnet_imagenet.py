"""Trains a ResNet on pictures in folders, in ImageNet's layout.

The workers share the pictures and average their gradients in every step.
How to run it: README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import ResNetConfig, ResNetForImageClassification

import coarse.torch
from image_folder import ImageFolder, Shard, Transform, centre_crop, folder_of_pictures, random_crop
from job import Job, Progress, join_job
from measure import Recorder

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ResNet on folders of pictures, data-parallel.")
    parser.add_argument(
        "--data", type=Path, help="folder with train/<class>/ and val/<class>/; default: drawn"
    )
    parser.add_argument("--depth", type=int, choices=BLOCKS, default=50)
    parser.add_argument("--small", action="store_true", help="a few thin layers instead of --depth")
    parser.add_argument("--image-size", type=int, help="default: 224 with --data, else 64")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="pictures of one step on each worker")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--loaders", type=int, default=0, help="processes that read pictures for each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="write what each worker measured: FILE-<rank>.json")
    return parser.parse_args()


def open_folder(folder: Path, transform: Transform) -> ImageFolder:
    try:
        return ImageFolder(folder, transform)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def build_model(arguments: argparse.Namespace, num_classes: int) -> nn.Module:
    if arguments.small:
        config = ResNetConfig(
            embedding_size=16,
            hidden_sizes=[16, 32, 64, 128],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            num_labels=num_classes,
        )
    else:
        basic = arguments.depth < 50
        config = ResNetConfig(
            hidden_sizes=[64, 128, 256, 512] if basic else [256, 512, 1024, 2048],
            depths=list(BLOCKS[arguments.depth]),
            layer_type="basic" if basic else "bottleneck",
            num_labels=num_classes,
        )
    return ResNetForImageClassification(config)


def train(model: nn.Module, data: ImageFolder, arguments: argparse.Namespace, job: Job) -> Recorder:
    """Trains for all epochs. `join` handles workers that have no batch left while others still have one."""
    shard = Shard(job, len(data), seed=arguments.seed)
    batches = DataLoader(data, arguments.batch, sampler=shard, num_workers=arguments.loaders)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    recorder = Recorder(job, arguments.report)
    with Progress(job, steps=arguments.epochs * len(batches)) as progress:
        for epoch in range(arguments.epochs):
            shard.epoch = epoch
            with model.join():
                for pictures, labels in batches:
                    with recorder.step(samples=len(labels)):
                        optimizer.zero_grad()
                        loss = nn.functional.cross_entropy(model(pictures).logits, labels)
                        loss.backward()
                        optimizer.step()
                    progress.advance(loss.item())
    return recorder


@torch.no_grad()
def accuracy_of(model: nn.Module, data: ImageFolder, batch: int, job: Job) -> float:
    """The share of correctly classified pictures; every worker classifies its part."""
    model.eval()
    right = torch.zeros(())
    for pictures, labels in DataLoader(data, batch, sampler=range(job.rank, len(data), job.world_size)):
        right += (model(pictures).logits.argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    model.train()
    return float(right) / len(data)


def main() -> None:
    arguments = read_arguments()
    size = arguments.image_size or (224 if arguments.data else 64)
    with join_job() as job, folder_of_pictures(arguments.data, job) as folder:
        torch.manual_seed(arguments.seed + job.rank)  # different crops on every worker
        train_data = open_folder(folder / "train", random_crop(size))
        val_data = open_folder(folder / "val", centre_crop(size))
        model = build_model(arguments, len(train_data.classes))
        model = coarse.torch.DistributedDataParallel(model)
        job.say(
            f"{len(train_data)} pictures of {len(train_data.classes)} classes, {len(val_data)} to validate"
        )
        recorder = train(model, train_data, arguments, job)
        accuracy = accuracy_of(model.module, val_data, arguments.batch, job)
        job.say(f"validation accuracy {accuracy:.2%}")
        pictures, labels = next(iter(DataLoader(train_data, arguments.batch)))
        recorder.write(
            model,
            lambda: nn.functional.cross_entropy(model(pictures).logits, labels),
            accuracy=accuracy,
        )


if __name__ == "__main__":
    main()

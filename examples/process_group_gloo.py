"""Trains a small network on handwritten digits with stock torch DDP; only the backend's name differs.

How to run it: README.md.
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="Handwritten digits on a process group.")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(dist.get_rank())
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(layers)
    share = slice(dist.get_rank(), None, dist.get_world_size())
    train(model, images[share], labels[share], arguments.epochs)
    right = (layers(images).argmax(1) == labels).float().mean()
    if dist.get_rank() == 0:
        print(f"right answers {100 * right:.2f}%", flush=True)
    del model  # a Reducer that is freed after its process group may hang at exit
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

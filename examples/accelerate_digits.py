"""Trains the digits of torch_digits.py with Hugging Face Accelerate; one line adds COARSE.

How to run it: README.md.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from coarse.accelerate import Accelerator
from torch_digits import accuracy_of, build_model, load_data, shifted


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits with Accelerate.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="samples of one step, over all workers")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest rate of the one-cycle schedule")
    parser.add_argument("--offload-optimizer", action="store_true", help="run it in the memory devices")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    on_processors = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=on_processors, offload_optimizer=arguments.offload_optimizer)
    torch.manual_seed(accelerator.process_index)
    train_data, test_data = load_data()
    batches = DataLoader(train_data, arguments.batch // accelerator.num_processes, shuffle=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    steps = arguments.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=arguments.lr, total_steps=steps)
    for _ in range(arguments.epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(shifted(images)), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
    accelerator.print(f"test accuracy {accuracy_of(accelerator.unwrap_model(model), test_data):.2%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Trains the digits of torch_digits.py with Lightning; an import and the strategy's name add COARSE.

How to run it: README.md.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import coarse.lightning  # noqa: F401  registers strategy="coarse"
from torch_digits import accuracy_of, build_model, load_data, shifted


class Digits(lightning.LightningModule):
    """The network of torch_digits.py, with its optimizer and schedule."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.network = build_model()
        self.lr = lr

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(shifted(images)), labels)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits with Lightning.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="samples of one step, over all workers")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest rate of the one-cycle schedule")
    parser.add_argument("--offload-optimizer", action="store_true", help="run it in the memory devices")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    lightning.seed_everything(0, verbose=False)
    train_data, test_data = load_data()
    batches = DataLoader(train_data, arguments.batch // arguments.workers, shuffle=True)
    trainer = lightning.Trainer(
        strategy="coarse_offload" if arguments.offload_optimizer else "coarse",
        accelerator="cpu",
        devices=arguments.workers,
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = Digits(arguments.lr)
    trainer.fit(model, batches)
    if trainer.is_global_zero:
        print(f"test accuracy {accuracy_of(model.network, test_data):.2%}")


if __name__ == "__main__":
    main()

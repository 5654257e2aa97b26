"""A worker, or a single process, whose trainers receive optimizer options; started by test_trainers.py."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from coarse.accelerate import Accelerator
from coarse.errors import NonFiniteGradientError
from coarse.lightning import CoarseStrategy
from coarse.torch import DistributedOptimizer
from coarse.torch.checkpoint import Checkpointer
from coarse.transformers import Trainer

LR, MAX_NORM = 0.1, 0.01
INPUTS = [{"inputs": torch.ones(4)} for _ in range(8)]


class Steep(lightning.LightningModule):
    """Starts at 0, with a gradient of 1000 for each of 4 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": 1000 * self.layer(inputs).mean()}

    def training_step(self, batch: Mapping[str, torch.Tensor], index: int) -> torch.Tensor:
        return self(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def check_clipped(module: Steep) -> None:
    """That one step was taken, by gradients of MAX_NORM."""
    expected = torch.full((1, 4), -LR * MAX_NORM / 4**0.5)
    torch.testing.assert_close(module.layer.weight.detach(), expected)


def prepared(**options: Any) -> tuple[Accelerator, Steep, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, offload_optimizer=options)
    module = Steep()
    return accelerator, module, *accelerator.prepare(module, module.configure_optimizers())


def with_accelerate() -> None:
    accelerator, module, model, optimizer = prepared(max_grad_norm=MAX_NORM, on_nonfinite="raise")
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, model, optimizer) as checkpointer:
        accelerator.backward(model(torch.ones(2, 4))["loss"])
        optimizer.step()
        check_clipped(module)
        checkpointer.step()
        checkpointer.save()
    assert optimizer.optimizer.gradient_norm == pytest.approx(2000)
    optimizer.zero_grad()
    accelerator.backward(model(torch.full((2, 4), torch.inf))["loss"])
    with pytest.raises(NonFiniteGradientError, match=r"parameter 'layer\.weight'"):
        optimizer.step()
    check_clipped(module)


def with_overlap() -> None:
    """Without memory devices it has no effect: gradients stay, and are clipped."""
    accelerator, module, model, optimizer = prepared(overlap=True)
    if optimizer.optimizer.runs_in_memory_devices:
        return
    accelerator.backward(model(torch.ones(2, 4))["loss"])
    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    check_clipped(module)


def with_misspelt_options() -> None:
    with pytest.raises(TypeError, match="max_norm"):
        prepared(max_norm=MAX_NORM)


def with_transformers() -> None:
    module = Steep()
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        settings = {"optim": "sgd", "learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 0}
        arguments = TrainingArguments(folder, use_cpu=True, max_steps=1, **settings, **quiet)
        options = {"max_grad_norm": MAX_NORM}
        Trainer(module, arguments, train_dataset=INPUTS, offload_optimizer=options).train()
    check_clipped(module)


def with_lightning(num_workers: int) -> None:
    module = Steep()
    trainer = lightning.Trainer(
        strategy=CoarseStrategy(offload_optimizer={"max_grad_norm": MAX_NORM}),
        accelerator="cpu",
        devices=num_workers,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(INPUTS, batch_size=2))
    assert isinstance(trainer.optimizers[0], DistributedOptimizer)
    check_clipped(module)


with_accelerate()
with_overlap()
with_misspelt_options()
with_transformers()
with_lightning(Accelerator(cpu=True).num_processes)
print("all as promised", flush=True)

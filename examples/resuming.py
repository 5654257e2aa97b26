"""The options `--offload-optimizer` and `--checkpoint-every`, with which an interrupted training loop can resume.

Without these options the loops are plain ones, nothing is saved, and COARSE is not imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a script's parser."""
    parser.add_argument(
        "--offload-optimizer",
        action="store_true",
        help="run the optimizer in the memory devices; needs a model that COARSE has wrapped",
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=0, metavar="STEPS", help="steps between two checkpoints"
    )
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("checkpoints"), metavar="FOLDER", help="where they are"
    )


def choose_optimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, options: argparse.Namespace
) -> Any:
    """`optimizer`, moved into the memory devices if the options request it."""
    if not options.offload_optimizer:
        if options.checkpoint_every:
            raise SystemExit("error: --checkpoint-every needs --offload-optimizer here")
        return optimizer
    import coarse.torch

    if not isinstance(model, coarse.torch.DistributedDataParallel):
        raise SystemExit(
            f"error: --offload-optimizer needs COARSE, and this model is a {type(model).__name__}"
        )
    return coarse.torch.DistributedOptimizer(optimizer, model)


class Resuming:
    """The position in a training loop, restored from memory devices that outlived the workers, or from the newest
    checkpoint.

    Args:
        model, optimizer: The model in training, and the optimizer from choose_optimizer().
        schedule: The learning rate schedule; its step() follows every step() of the optimizer.
        options: The options from add_options().
    """

    def __init__(self, model: Any, optimizer: Any, schedule: Any, options: argparse.Namespace) -> None:
        self._recovery: Any = None
        self._checkpointer: Any = None
        if not options.offload_optimizer:
            return
        import coarse.torch
        from coarse.torch.checkpoint import Checkpointer

        self._recovery = coarse.torch.Recovery(
            model, optimizer, state={"schedule": schedule}, on_resume=schedule.step
        )
        if options.checkpoint_every:
            self._checkpointer = Checkpointer(
                options.checkpoints,
                model,
                optimizer,
                every=options.checkpoint_every,
                state={"recovery": self._recovery},
                first_step=self._recovery.step,
            )
            if not self._recovery.step:
                self._checkpointer.restore()

    @property
    def step(self) -> int:
        """Number of steps that earlier attempts completed."""
        return 0 if self._recovery is None else self._recovery.step

    def epochs(self, count: int) -> Iterable[int]:
        """The remaining epochs of `count`."""
        return range(count) if self._recovery is None else self._recovery.epochs(count)

    def batches(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The remaining batches of this epoch."""
        return loader if self._recovery is None else self._recovery.batches(loader)

    def save(self) -> None:
        """Saves if a save is due; call it directly after the optimizer's step()."""
        if self._checkpointer is not None:
            self._checkpointer.step()

    def __enter__(self) -> Resuming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()

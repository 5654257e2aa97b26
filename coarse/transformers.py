"""transformers.Trainer with COARSE: memory devices average the gradients of the model.

Example:
    >>> from coarse.transformers import Trainer  # was: from transformers import Trainer
    >>> Trainer(model, arguments, train_dataset=windows).train()
    >>> Trainer(model, arguments, train_dataset=windows, offload_optimizer=True).train()  # in the memory devices
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedDataParallelKwargs

from coarse.accelerate import Accelerator
from coarse.torch.batches import count_batch


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer with the accelerator of coarse.accelerate.

    Args:
        offload_optimizer: As for coarse.accelerate.Accelerator. `optim` of the TrainingArguments must then be an
            optimizer that memory devices can run, such as "adamw_torch". {"overlap": True} needs max_grad_norm=0
            there.

    Raises:
        ValueError: If gradients are to be clipped, but overlap=True leaves no gradients.
    """

    def __init__(
        self, *arguments: Any, offload_optimizer: bool | Mapping[str, Any] = False, **keywords: Any
    ) -> None:
        self._offload_optimizer = offload_optimizer
        super().__init__(*arguments, **keywords)

    def create_accelerator_and_postprocess(self) -> None:
        """Called by the constructor; not meant for users."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _TrainersAccelerator  # transformers hard-codes the class
        self.accelerator._offload_by(self._offload_optimizer)
        if (self.args.max_grad_norm or 0) > 0:
            self.accelerator._offloading.check_clipping_option(
                f"TrainingArguments(max_grad_norm={self.args.max_grad_norm}), where 0 clips nothing,"
            )

    def training_step(self, model: torch.nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        """Also counts the batch's rows as samples in the session's metrics."""
        count_batch(inputs)
        return super().training_step(model, inputs, *arguments, **keywords)


class _TrainersAccelerator(Accelerator):
    def _count_samples(self, model: torch.nn.Module) -> None:
        """Does nothing: the trainer counts them."""

    def _view_of_gradients(self, handler: DistributedDataParallelKwargs) -> dict[str, bool]:
        """Always uses views: transformers has no setting for it, and only its own loop reads the gradients."""
        return {"gradient_as_bucket_view": True}

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """As Accelerator's; None if transformers only needs the norm for its log and no gradients exist."""
        parameters = list(parameters)
        if math.isinf(max_norm) and self._offloading.overlaps(parameters):
            return None
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

"""transformers.Trainer with COARSE: gradients of the model it trains are averaged by memory devices.

Example:
    >>> from coarse.transformers import Trainer  # was: from transformers import Trainer
    >>> Trainer(model, arguments, train_dataset=windows).train()
    >>> Trainer(model, arguments, train_dataset=windows, offload_optimizer=True).train()  # in the memory devices
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from accelerate.utils import DistributedDataParallelKwargs

from coarse.accelerate import Accelerator


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """As transformers' Trainer, whose accelerator is coarse.accelerate's.

    Args:
        offload_optimizer: As coarse.accelerate.Accelerator has it. `optim` of the TrainingArguments then is one that
            memory devices know, such as "adamw_torch".
    """

    def __init__(
        self, *arguments: Any, offload_optimizer: bool | Mapping[str, Any] = False, **keywords: Any
    ) -> None:
        self._offload_optimizer = offload_optimizer
        super().__init__(*arguments, **keywords)

    def create_accelerator_and_postprocess(self) -> None:
        """Called by the constructor; not meant for users."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _TrainersAccelerator  # transformers names the class it makes
        self.accelerator._offload_by(self._offload_optimizer)


class _TrainersAccelerator(Accelerator):
    def _view_of_gradients(self, handler: DistributedDataParallelKwargs) -> dict[str, bool]:
        """transformers has no setting for it, and nobody else sees the gradients of its loop."""
        return {"gradient_as_bucket_view": True}

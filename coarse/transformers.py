"""transformers.Trainer with COARSE: gradients of the model it trains are averaged by memory devices.

Example:
    >>> from coarse.transformers import Trainer  # was: from transformers import Trainer
    >>> Trainer(model, arguments, train_dataset=windows).train()
"""

from __future__ import annotations

import transformers
from accelerate.utils import DistributedDataParallelKwargs

from coarse.accelerate import Accelerator


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """As transformers' Trainer, whose accelerator is coarse.accelerate's."""

    def create_accelerator_and_postprocess(self) -> None:
        """Called by the constructor; not meant for users."""
        super().create_accelerator_and_postprocess()
        # transformers names the class it makes; COARSE's adds no state to it.
        self.accelerator.__class__ = _TrainersAccelerator


class _TrainersAccelerator(Accelerator):
    def _view_of_gradients(self, handler: DistributedDataParallelKwargs) -> dict[str, bool]:
        """transformers has no setting for it, and nobody else sees the gradients of its loop."""
        return {"gradient_as_bucket_view": True}

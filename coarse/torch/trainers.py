"""Optimizers of trainers (Accelerate, transformers, Lightning) that are to run in the memory devices."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from coarse.torch.distributed import DistributedDataParallel
from coarse.torch.optimizer import DistributedOptimizer


class OptimizerOffloading:
    """Has a trainer's optimizers run in the memory devices of the models that it has wrapped.

    Args:
        offload_optimizer: Whether it does; or what else DistributedOptimizer is given, such as {"overlap": True}.
    """

    def __init__(self, offload_optimizer: bool | Mapping[str, Any]) -> None:
        self._options = dict(offload_optimizer) if isinstance(offload_optimizer, Mapping) else {}
        self._models = weakref.WeakSet[DistributedDataParallel]()
        self.is_wanted = isinstance(offload_optimizer, Mapping) or offload_optimizer

    def add_model(self, model: DistributedDataParallel) -> DistributedDataParallel:
        """Returns the model, whose optimizer may come next."""
        self._models.add(model)
        return model

    def apply(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What is to take the optimizer's place.

        Raises:
            ValueError: If none of the models has its parameters, or DistributedOptimizer refuses it.
        """
        if not self.is_wanted or isinstance(optimizer, DistributedOptimizer):
            return optimizer
        return DistributedOptimizer(optimizer, self._model_of(optimizer), **self._options)

    def _model_of(self, optimizer: torch.optim.Optimizer) -> DistributedDataParallel:
        members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            if any(id(parameter) in members for parameter in model.parameters()):
                return model
        raise ValueError(
            f"{type(optimizer).__name__} has the parameters of no model that was set up, and offload_optimizer has "
            "it run in the memory devices of its model: set up the model before it, as in prepare(model, optimizer)"
        )

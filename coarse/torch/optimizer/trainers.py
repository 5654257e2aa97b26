"""Optimizers of trainers (Accelerate, transformers, Lightning) that are to run in the memory devices."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch

from coarse.torch.ddp.distributed import DistributedDataParallel
from coarse.torch.optimizer.distributed_optimizer import DistributedOptimizer

Module = TypeVar("Module", bound=torch.nn.Module)

_WRAPPING_PACKAGES = frozenset({"accelerate", "lightning"})


class OptimizerOffloading:
    """Has a trainer's optimizers run in the memory devices of the models that it has wrapped.

    One of a model that is not wrapped, as a process that trains alone leaves it, runs here, by the same options.

    Args:
        offload_optimizer: Whether it does; or what else DistributedOptimizer is given, such as {"overlap": True}
            where gradients are not clipped.
    """

    def __init__(self, offload_optimizer: bool | Mapping[str, Any]) -> None:
        self._options = dict(offload_optimizer) if isinstance(offload_optimizer, Mapping) else {}
        self._models = weakref.WeakSet[torch.nn.Module]()
        self._optimizers = weakref.WeakSet[DistributedOptimizer]()
        self.is_wanted = isinstance(offload_optimizer, Mapping) or offload_optimizer

    @property
    def has_options(self) -> bool:
        """Whether more is asked for than memory devices, which a process that trains alone has none of."""
        return bool(self._options)

    def add_model(self, model: Module) -> Module:
        """Returns the model, whose optimizer may come next."""
        self._models.add(model)
        return model

    def apply(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What is to take the optimizer's place.

        Raises:
            ValueError: If none of the models has its parameters, or DistributedOptimizer refuses it.
        """
        if self.is_wanted and not isinstance(optimizer, DistributedOptimizer):
            optimizer = DistributedOptimizer(optimizer, self._model_of(optimizer), **self._options)
        if isinstance(optimizer, DistributedOptimizer):
            self._optimizers.add(optimizer)
        return optimizer

    def overlaps(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether memory devices update one of the parameters during backward(), which leaves no gradient of it."""
        asked = {id(parameter) for parameter in parameters}
        overlapping = [each for each in self._optimizers if each.overlaps]
        return any(id(parameter) in asked for each in overlapping for parameter in parameters_of(each))

    def check_clipping(self, asked: str, parameters: Iterable[torch.Tensor]) -> None:
        """Has nobody train without the clipping of gradients that was asked for.

        Args:
            asked: What asks for it.
            parameters: Whose gradients they are.

        Raises:
            ValueError: If overlaps(parameters).
        """
        if self.overlaps(parameters):
            raise _clipping_error(asked)

    def check_clipping_option(self, asked: str) -> None:
        """The same before there is an optimizer.

        Raises:
            ValueError: If optimizers are to have overlap=True.
        """
        if self._options.get("overlap"):
            raise _clipping_error(asked)

    def _model_of(self, optimizer: torch.optim.Optimizer) -> DistributedDataParallel:
        model = self._set_up_with(optimizer)
        return model if isinstance(model, DistributedDataParallel) else DistributedDataParallel(model)

    def _set_up_with(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        members = {id(parameter) for parameter in parameters_of(optimizer)}
        for model in self._models:
            if any(id(parameter) in members for parameter in model.parameters()):
                return model
        raise ValueError(
            f"{type(optimizer).__name__} has the parameters of no model that was set up, and offload_optimizer has "
            "it run in the memory devices of its model: set up the model before it, as in prepare(model, optimizer)"
        )


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of what Accelerate or Lightning have made of it; else what was given.

    Their wrappers pass for torch's optimizers, and have none of their hooks.
    """
    packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    return optimizer if packages.isdisjoint(_WRAPPING_PACKAGES) else bare_optimizer(optimizer.optimizer)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that it updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _clipping_error(asked: str) -> ValueError:
    return ValueError(
        f"{asked} does not go with an optimizer that has overlap=True: memory devices update parameters during "
        "backward(), after which there is no gradient to clip. Leave overlap out, as in offload_optimizer=True or "
        '{"max_grad_norm": 1.0}, with which memory devices clip; or clip nothing'
    )

"""Runs optimizers of trainers (Accelerate, transformers, Lightning) in the memory devices."""

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
    """Moves a trainer's optimizers to the memory devices of the models that it has wrapped.

    An optimizer of an unwrapped model, as in a process that trains alone, runs on the worker with the same options.

    Args:
        offload_optimizer: Whether to move optimizers; or further arguments of DistributedOptimizer, such as
            {"overlap": True} if gradients are not clipped.
    """

    def __init__(self, offload_optimizer: bool | Mapping[str, Any]) -> None:
        self._options = dict(offload_optimizer) if isinstance(offload_optimizer, Mapping) else {}
        self._models = weakref.WeakSet[torch.nn.Module]()
        self._optimizers = weakref.WeakSet[DistributedOptimizer]()
        self.is_wanted = isinstance(offload_optimizer, Mapping) or offload_optimizer

    @property
    def has_options(self) -> bool:
        """Whether options were given, which also apply without memory devices, in a process that trains alone."""
        return bool(self._options)

    def add_model(self, model: Module) -> Module:
        """Registers and returns a model, whose optimizer may be passed to apply() later."""
        self._models.add(model)
        return model

    def apply(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns the replacement of the optimizer.

        Raises:
            ValueError: If none of the models has its parameters, or DistributedOptimizer refuses it.
        """
        if self.is_wanted and not isinstance(optimizer, DistributedOptimizer):
            optimizer = DistributedOptimizer(optimizer, self._model_of(optimizer), **self._options)
        if isinstance(optimizer, DistributedOptimizer):
            self._optimizers.add(optimizer)
        return optimizer

    def overlaps(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether memory devices update one of the parameters during backward(), so that no gradient remains."""
        asked = {id(parameter) for parameter in parameters}
        overlapping = [each for each in self._optimizers if each.overlaps]
        return any(id(parameter) in asked for each in overlapping for parameter in parameters_of(each))

    def check_clipping(self, asked: str, parameters: Iterable[torch.Tensor]) -> None:
        """Raises an error instead of silently ignoring requested gradient clipping.

        Args:
            asked: The option or call that requests clipping.
            parameters: The parameters whose gradients are to be clipped.

        Raises:
            ValueError: If overlaps(parameters).
        """
        if self.overlaps(parameters):
            raise _clipping_error(asked)

    def check_clipping_option(self, asked: str) -> None:
        """As check_clipping(), before an optimizer exists.

        Raises:
            ValueError: If optimizers will have overlap=True.
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
            f"{type(optimizer).__name__} has no parameters of a model that was set up, but offload_optimizer runs it "
            "in the memory devices of its model: set up the model first, as in prepare(model, optimizer)"
        )


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a wrapper of Accelerate or Lightning; other arguments are returned unchanged.

    These wrappers are instances of torch's optimizer class, but lack its hooks.
    """
    packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    return optimizer if packages.isdisjoint(_WRAPPING_PACKAGES) else bare_optimizer(optimizer.optimizer)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of the optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _clipping_error(asked: str) -> ValueError:
    return ValueError(
        f"{asked} cannot be combined with an optimizer that has overlap=True: memory devices update parameters "
        "during backward(), after which no gradient is left to clip. Omit overlap, as in offload_optimizer=True "
        'or {"max_grad_norm": 1.0}, with which memory devices clip; or disable clipping'
    )

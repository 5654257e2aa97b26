"""Hugging Face Accelerate with COARSE: memory devices average the gradients of prepared models.

Example:
    >>> from coarse.accelerate import Accelerator  # was: from accelerate import Accelerator
    >>> accelerator = Accelerator()
    >>> model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch.distributed.algorithms.join import Join, Joinable

from coarse.torch import DistributedDataParallel
from coarse.torch.batches import count_forwards
from coarse.torch.optimizer.trainers import OptimizerOffloading

_DATA_PARALLEL = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Replaces accelerate.Accelerator for several workers: same arguments, same process group.

    A process without a launcher, FSDP, DeepSpeed and Megatron use accelerate's own implementation.

    Args:
        offload_optimizer: Whether optimizers run in the memory devices, through coarse.torch.DistributedOptimizer.
            A dictionary has further arguments for it, such as {"max_grad_norm": 1.0}, or {"overlap": True} if
            gradients are not clipped. Pass a model to prepare() before its optimizer. A process without a launcher
            has no memory devices, and applies the same options to gradients.

    Raises:
        ValueError: If offload_optimizer is combined with FSDP, DeepSpeed or Megatron.
    """

    def __init__(
        self, *arguments: Any, offload_optimizer: bool | Mapping[str, Any] = False, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._offload_by(offload_optimizer)

    def _offload_by(self, offload_optimizer: bool | Mapping[str, Any]) -> None:
        self._offloading = OptimizerOffloading(offload_optimizer)
        if self._offloading.is_wanted and self.distributed_type not in (*_DATA_PARALLEL, DistributedType.NO):
            raise ValueError(
                f"offload_optimizer cannot be combined with {self.distributed_type.value}, which manages "
                "optimizers itself; leave one of them out"
            )

    @property
    def _is_alone(self) -> bool:
        return bool(self.distributed_type == DistributedType.NO)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Places the model as accelerate does, and wraps it in coarse.torch.DistributedDataParallel.

        The wrapper gets the arguments and the communication hook of a DistributedDataParallelKwargs handler. With
        torch.compile, it wraps the compiled module.
        """
        is_prepared = getattr(model, "_is_accelerate_prepared", False)
        parallelism = getattr(self, "parallelism_config", None)
        has_other_parallelism = parallelism is not None and parallelism.tp_enabled
        if is_prepared or has_other_parallelism or self.distributed_type not in _DATA_PARALLEL:
            prepared = super().prepare_model(model, device_placement, evaluation_mode)
            return self._offloading.add_model(prepared) if self._is_alone else prepared
        placed = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return placed
        handler = self.ddp_handler
        arguments = {} if handler is None else {**handler.to_kwargs(), **self._view_of_gradients(handler)}
        device_ids = None if self.device.type == "cpu" else [self.device]
        wrapped = DistributedDataParallel(placed, device_ids=device_ids, **arguments)
        if handler is not None:
            handler.register_comm_hook(wrapped)
        del placed._is_accelerate_prepared  # it may be prepared again once it is unwrapped
        wrapped._is_accelerate_prepared = True
        self._count_samples(wrapped)
        # accelerate stores the unwrapped models, so its saved files have no wrapper.
        return self._offloading.add_model(wrapped)

    def _count_samples(self, model: DistributedDataParallel) -> None:
        """Counts samples of a prepared model in the session's metrics."""
        count_forwards(model)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """As accelerate's; with offload_optimizer, the optimizer runs in the memory devices, if any.

        Raises:
            ValueError: If no prepared model has its parameters, or DistributedOptimizer refuses it.
        """
        is_prepared = getattr(optimizer, "_is_accelerate_prepared", False)
        is_offloaded = self.distributed_type in _DATA_PARALLEL
        if not is_prepared and (is_offloaded or (self._is_alone and self._offloading.has_options)):
            optimizer = self._offloading.apply(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """As accelerate's.

        Raises:
            ValueError: If the parameters' optimizer has overlap=True, so that no gradients are left.
        """
        parameters = _as_list(parameters)
        self._offloading.check_clipping("clip_grad_norm_()", parameters)
        norm: torch.Tensor | None = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """As accelerate's.

        Raises:
            ValueError: If the parameters' optimizer has overlap=True, so that no gradients are left.
        """
        parameters = _as_list(parameters)
        self._offloading.check_clipping("clip_grad_value_()", parameters)
        super().clip_grad_value_(parameters, clip_value)

    def _view_of_gradients(self, handler: DistributedDataParallelKwargs) -> dict[str, bool]:
        """Arguments that to_kwargs() omits because they equal accelerate's defaults, which differ from COARSE's."""
        return {"gradient_as_bucket_view": handler.gradient_as_bucket_view}

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Joinable], even_batches: bool | None = None
    ) -> Iterator[None]:
        """As accelerate's, also for workers on CPUs: workers without batches wait for the others.

        Args:
            joinables: Prepared models.
            even_batches: Whether map-style loaders repeat samples meanwhile, so that all have equally many batches;
                None keeps the current setting.
        """
        if self.distributed_type != DistributedType.MULTI_CPU:
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        all_samplers = [loader.batch_sampler for loader in self._dataloaders]
        samplers = [each for each in all_samplers if hasattr(each, "even_batches")]
        if even_batches is not None and len(samplers) < len(all_samplers):
            warnings.warn(
                "even_batches is only supported for map-style datasets; dataloaders of iterable datasets stay "
                "unchanged",
                stacklevel=3,
            )
        before = [each.even_batches for each in samplers]
        is_even = self.even_batches if even_batches is None else even_batches
        try:
            for each in samplers if even_batches is not None else ():
                each.even_batches = even_batches
            with Join(list(joinables), enable=not is_even, throw_on_early_termination=False):
                yield
        finally:
            for each, value in zip(samplers, before, strict=True):
                each.even_batches = value


def _as_list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

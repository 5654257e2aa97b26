"""Lightning with COARSE: `import coarse.lightning`, then Trainer(strategy="coarse"), or Fabric(strategy="coarse").

Example:
    >>> import coarse.lightning
    >>> trainer = lightning.Trainer(strategy="coarse", accelerator="cpu", devices=2)  # was: strategy="ddp"
    >>> trainer = lightning.Trainer(strategy="coarse_offload", ...)  # with the optimizer in the memory devices
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric import strategies as fabric
from lightning.pytorch import strategies

from coarse.torch import DistributedDataParallel
from coarse.torch.batches import count_batch, count_forwards
from coarse.torch.optimizer.trainers import OptimizerOffloading, parameters_of

NAME = "coarse"


class CoarseStrategy(strategies.DDPStrategy):  # type: ignore[misc]
    """Replaces DDPStrategy, with the same arguments; memory devices average gradients.

    As under "ddp", Lightning, torchrun, `coarse run` or Slurm starts the processes and assigns their ranks.

    Communication hooks are those of DistributedDataParallel.register_comm_hook().

    Args:
        offload_optimizer: Whether the optimizers from configure_optimizers() run in the memory devices, through
            coarse.torch.DistributedOptimizer. A dictionary has further arguments for it, such as
            {"max_grad_norm": 1.0}, or {"overlap": True} if Lightning clips no gradients.

    Raises:
        ValueError: By fit(), if gradients are to be clipped, but overlap=True leaves no gradients.
    """

    strategy_name = NAME

    def __init__(self, *, offload_optimizer: bool | Mapping[str, Any] = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._offloading = OptimizerOffloading(offload_optimizer)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers strategy="coarse", and the other names in _register(), for Trainer."""
        _register(strategy_registry, cls)

    def setup_optimizers(self, trainer: Any) -> None:
        """Called by the trainer; not meant for users."""
        super().setup_optimizers(trainer)
        self.optimizers = [self._offloading.apply(each) for each in super().optimizers]
        if (trainer.gradient_clip_val or 0) > 0:
            parameters = [parameter for each in self.optimizers for parameter in parameters_of(each)]
            self._offloading.check_clipping(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val})", parameters
            )
        self._watch_clipping()

    def training_step(self, batch: Any, *arguments: Any, **keywords: Any) -> Any:
        """Called by the trainer, not meant for users; counts the batch as samples in the session's metrics."""
        count_batch(batch)
        return super().training_step(batch, *arguments, **keywords)

    def _watch_clipping(self) -> None:
        """Makes LightningModule.clip_gradients() raise as well: modules may call it despite the trainer's options."""
        plugin = self.precision_plugin
        clip = type(plugin).clip_gradients

        def clip_checked(optimizer: Any, clip_val: float = 0.0, *arguments: Any, **keywords: Any) -> None:
            if clip_val > 0:
                self._offloading.check_clipping("clip_gradients()", parameters_of(optimizer))
            clip(plugin, optimizer, clip_val, *arguments, **keywords)

        plugin.clip_gradients = clip_checked

    def _setup_model(self, model: Any) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        return self._offloading.add_model(
            DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)
        )

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None:  # Lightning registers them only on GPUs
            wrapper = self._ddp_comm_wrapper
            hook = self._ddp_comm_hook if wrapper is None else wrapper(self._ddp_comm_hook)
            self.model.register_comm_hook(self._ddp_comm_state, hook)


class CoarseFabricStrategy(fabric.DDPStrategy):  # type: ignore[misc]
    """Replaces Fabric's DDPStrategy, with the same arguments.

    Args:
        offload_optimizer: As for CoarseStrategy. Set up a model before its optimizer, or together with it.
    """

    def __init__(self, *, offload_optimizer: bool | Mapping[str, Any] = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._offloading = OptimizerOffloading(offload_optimizer)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers strategy="coarse", and the other names in _register(), for Fabric."""
        _register(strategy_registry, cls)

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Called by Fabric; not meant for users."""
        device_ids = self._determine_ddp_device_ids()
        wrapped = DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)
        count_forwards(wrapped)
        return self._offloading.add_model(wrapped)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Called by Fabric; not meant for users."""
        return self._offloading.apply(optimizer)

    def clip_gradients_norm(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *arguments: Any, **keywords: Any
    ) -> torch.Tensor:
        """Called by Fabric; not meant for users."""
        self._offloading.check_clipping("clip_gradients()", parameters_of(optimizer))
        return super().clip_gradients_norm(module, optimizer, *arguments, **keywords)

    def clip_gradients_value(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, clip_val: float
    ) -> None:
        """Called by Fabric; not meant for users."""
        self._offloading.check_clipping("clip_gradients()", parameters_of(optimizer))
        super().clip_gradients_value(module, optimizer, clip_val)


def _register(registry: Any, strategy: type) -> None:
    """Registers a strategy under the counterparts of Lightning's "ddp" names, and as "coarse_offload"."""
    averaged = "Gradients are averaged by memory devices"
    for suffix, description, options in (
        ("", averaged, {}),
        ("_find_unused_parameters_true", f"{averaged}, unused ones too", {"find_unused_parameters": True}),
        ("_offload", f"{averaged}, which run the optimizer too", {"offload_optimizer": True}),
        (
            "_offload_find_unused_parameters_true",
            f"{averaged}, unused ones too, which run the optimizer",
            {"offload_optimizer": True, "find_unused_parameters": True},
        ),
    ):
        if f"{NAME}{suffix}" not in registry:
            registry.register(f"{NAME}{suffix}", strategy, description=description, **options)


CoarseStrategy.register_strategies(strategies.StrategyRegistry)
CoarseFabricStrategy.register_strategies(fabric.STRATEGY_REGISTRY)

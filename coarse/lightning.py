"""Lightning with COARSE: `import coarse.lightning`, then Trainer(strategy="coarse"), or Fabric(strategy="coarse").

Example:
    >>> import coarse.lightning
    >>> trainer = lightning.Trainer(strategy="coarse", accelerator="cpu", devices=2)  # was: strategy="ddp"
    >>> trainer = lightning.Trainer(strategy="coarse_offload", ...)  # and the optimizer runs in the memory devices
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric import strategies as fabric
from lightning.pytorch import strategies

from coarse.torch import DistributedDataParallel
from coarse.torch.optimizer.trainers import OptimizerOffloading, parameters_of

NAME = "coarse"


class CoarseStrategy(strategies.DDPStrategy):  # type: ignore[misc]
    """As DDPStrategy, and takes its arguments; gradients are averaged by memory devices.

    Processes are started and told their ranks as under "ddp": by Lightning, torchrun, `coarse run` or Slurm.

    Communication hooks are those of DistributedDataParallel.register_comm_hook().

    Args:
        offload_optimizer: Whether what configure_optimizers() returns, one optimizer or several, runs in the memory
            devices, as coarse.torch.DistributedOptimizer has it; or what else that is to be given, such as
            {"max_grad_norm": 1.0}, or {"overlap": True} where Lightning clips no gradients.

    Raises:
        ValueError: By fit(), if gradients are to be clipped that overlap=True leaves nothing of.
    """

    strategy_name = NAME

    def __init__(self, *, offload_optimizer: bool | Mapping[str, Any] = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._offloading = OptimizerOffloading(offload_optimizer)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes strategy="coarse" known to Trainer, and what else _register() names."""
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

    def _watch_clipping(self) -> None:
        """Has LightningModule.clip_gradients() raise as well: modules may call it whatever the trainer is told."""
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
        if self._ddp_comm_hook is not None:  # Lightning registers them on GPUs alone
            wrapper = self._ddp_comm_wrapper
            hook = self._ddp_comm_hook if wrapper is None else wrapper(self._ddp_comm_hook)
            self.model.register_comm_hook(self._ddp_comm_state, hook)


class CoarseFabricStrategy(fabric.DDPStrategy):  # type: ignore[misc]
    """The same for Fabric: as its DDPStrategy, and takes its arguments.

    Args:
        offload_optimizer: As for CoarseStrategy. A model is set up before its optimizer, or with it.
    """

    def __init__(self, *, offload_optimizer: bool | Mapping[str, Any] = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._offloading = OptimizerOffloading(offload_optimizer)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes strategy="coarse" known to Fabric, and what else _register() names."""
        _register(strategy_registry, cls)

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Called by Fabric; not meant for users."""
        device_ids = self._determine_ddp_device_ids()
        return self._offloading.add_model(
            DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)
        )

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
    """Under the names that Lightning has of "ddp", and as "coarse_offload"."""
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

"""Lightning with COARSE: `import coarse.lightning`, then Trainer(strategy="coarse").

Example:
    >>> import coarse.lightning
    >>> trainer = lightning.Trainer(strategy="coarse", accelerator="cpu", devices=2)  # was: strategy="ddp"
    >>> trainer = lightning.Trainer(strategy="coarse_offload", ...)  # and the optimizer runs in the memory devices
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from coarse.torch import DistributedDataParallel, DistributedOptimizer
from coarse.torch.comm_hooks import travel_dtype
from coarse.torch.optimizer import options_of_offloading

NAME = "coarse"


class CoarseStrategy(DDPStrategy):  # type: ignore[misc]
    """As DDPStrategy, and takes its arguments; gradients are averaged by memory devices.

    Processes are started and told their ranks as under "ddp": by Lightning, torchrun, `coarse run` or Slurm.

    Of communication hooks it takes those of DistributedDataParallel.register_comm_hook().

    Args:
        offload_optimizer: Whether what configure_optimizers() returns, one optimizer of all trainable parameters,
            runs in the memory devices, as coarse.torch.DistributedOptimizer has it; or what else that is to be
            given, such as {"overlap": True}.

    Raises:
        NotImplementedError: For other hooks.
        ValueError: If it is given a hook's wrapper.
    """

    strategy_name = NAME

    def __init__(self, *, offload_optimizer: bool | Mapping[str, Any] = False, **arguments: Any) -> None:
        if (hook := arguments.get("ddp_comm_hook")) is not None:
            travel_dtype(hook)
        if arguments.get("ddp_comm_wrapper") is not None:
            raise ValueError(
                f"strategy {NAME!r} was given ddp_comm_wrapper: wrappers work on torch's buckets, and memory devices "
                "average tensor by tensor. Leave it out, or train with strategy='ddp'."
            )
        super().__init__(**arguments)
        self._offloading = options_of_offloading(offload_optimizer)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes strategy="coarse" known to Lightning; done once, as this module is imported.

        And "coarse_find_unused_parameters_true", as Lightning has it of "ddp", and "coarse_offload".
        """
        averaged = "Gradients are averaged by memory devices"
        strategy_registry.register(NAME, cls, description=averaged)
        strategy_registry.register(
            f"{NAME}_find_unused_parameters_true",
            cls,
            description=f"{averaged}, unused ones too",
            find_unused_parameters=True,
        )
        strategy_registry.register(
            f"{NAME}_offload",
            cls,
            description=f"{averaged}, which run the optimizer too",
            offload_optimizer=True,
        )

    def setup_optimizers(self, trainer: Any) -> None:
        """Called by the trainer; not meant for users."""
        super().setup_optimizers(trainer)
        if self._offloading is not None:
            given: list[torch.optim.Optimizer] = super().optimizers
            self.optimizers = [DistributedOptimizer(each, self.model, **self._offloading) for each in given]

    def _setup_model(self, model: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None:  # Lightning registers them on GPUs alone
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


if NAME not in StrategyRegistry:
    CoarseStrategy.register_strategies(StrategyRegistry)

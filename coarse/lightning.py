"""Lightning with COARSE: `import coarse.lightning`, then Trainer(strategy="coarse").

Example:
    >>> import coarse.lightning
    >>> trainer = lightning.Trainer(strategy="coarse", accelerator="cpu", devices=2)  # was: strategy="ddp"
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from coarse.torch import DistributedDataParallel

NAME = "coarse"


class CoarseStrategy(DDPStrategy):  # type: ignore[misc]
    """As DDPStrategy, and takes its arguments; gradients are averaged by memory devices.

    Processes are started and told their ranks as under "ddp": by Lightning, torchrun, `coarse run` or Slurm.

    Raises:
        ValueError: If it is given a communication hook, which has no buckets to work on here.
    """

    strategy_name = NAME

    def __init__(self, **arguments: Any) -> None:
        hooks = sorted(name for name, value in arguments.items() if name.startswith("ddp_comm_") and value)
        if hooks:
            raise ValueError(
                f"strategy {NAME!r} was given {', '.join(hooks)}: communication hooks work on torch's buckets, and "
                "memory devices average tensor by tensor. Leave them out, or train with strategy='ddp'."
            )
        super().__init__(**arguments)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes strategy="coarse" known to Lightning; done once, as this module is imported."""
        strategy_registry.register(NAME, cls, description="Gradients are averaged by memory devices")

    def _setup_model(self, model: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


if NAME not in StrategyRegistry:
    CoarseStrategy.register_strategies(StrategyRegistry)

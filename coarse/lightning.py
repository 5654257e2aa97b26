"""Lightning with COARSE: `import coarse.lightning`, then Trainer(strategy="coarse").

Example:
    >>> import coarse.lightning
    >>> trainer = lightning.Trainer(strategy="coarse", accelerator="cpu", devices=2)  # was: strategy="ddp"
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from coarse.torch import DistributedDataParallel
from coarse.torch.comm_hooks import travel_dtype

NAME = "coarse"
NAME_WITH_UNUSED = f"{NAME}_find_unused_parameters_true"


class CoarseStrategy(DDPStrategy):  # type: ignore[misc]
    """As DDPStrategy, and takes its arguments; gradients are averaged by memory devices.

    Processes are started and told their ranks as under "ddp": by Lightning, torchrun, `coarse run` or Slurm.

    Of communication hooks it takes those of DistributedDataParallel.register_comm_hook().

    Raises:
        NotImplementedError: For other hooks.
        ValueError: If it is given a hook's wrapper.
    """

    strategy_name = NAME

    def __init__(self, **arguments: Any) -> None:
        if (hook := arguments.get("ddp_comm_hook")) is not None:
            travel_dtype(hook)
        if arguments.get("ddp_comm_wrapper") is not None:
            raise ValueError(
                f"strategy {NAME!r} was given ddp_comm_wrapper: wrappers work on torch's buckets, and memory devices "
                "average tensor by tensor. Leave it out, or train with strategy='ddp'."
            )
        super().__init__(**arguments)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes strategy="coarse" known to Lightning; done once, as this module is imported.

        And "coarse_find_unused_parameters_true", as Lightning has it of "ddp".
        """
        description = "Gradients are averaged by memory devices"
        strategy_registry.register(NAME, cls, description=description)
        strategy_registry.register(
            NAME_WITH_UNUSED, cls, description=f"{description}, unused ones too", find_unused_parameters=True
        )

    def _setup_model(self, model: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None:  # Lightning registers them on GPUs alone
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


if NAME not in StrategyRegistry:
    CoarseStrategy.register_strategies(StrategyRegistry)

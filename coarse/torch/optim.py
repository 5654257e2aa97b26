"""Optimizers that torch.optim lacks; they run on workers or, with DistributedOptimizer, in the memory devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):  # type: ignore[misc]
    """Moves each parameter by the sign of an interpolated first moment.

    Needs a learning rate three to ten times smaller than AdamW, and a weight decay larger by the same factor.

    Args:
        params: Parameters, or dicts of parameter groups, as for every optimizer of torch.
        lr: Learning rate.
        betas: Weights of the moment in the interpolation whose sign is taken, and in the moment's decay.
        weight_decay: Decoupled from the gradient, as in AdamW.
        maximize: Whether to maximise the objective instead of minimising it.

    Raises:
        ValueError: If a coefficient is out of range.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", program 1.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if lr < 0:
            raise ValueError(f"lr={lr} must be at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} must be at least 0 and below 1")
        if weight_decay < 0:
            raise ValueError(f"weight_decay={weight_decay} must be at least 0")
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have gradients; returns the result of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for options in self.param_groups:
            for parameter in options["params"]:
                if parameter.grad is not None:
                    self._update(parameter, options)
        return loss

    def _update(self, parameter: torch.nn.Parameter, options: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        moment, (beta1, beta2) = state["exp_avg"], options["betas"]
        gradient = -parameter.grad if options["maximize"] else parameter.grad
        direction = (beta1 * moment).add_(gradient, alpha=1 - beta1).sign_()
        parameter.mul_(1 - options["lr"] * options["weight_decay"])
        parameter.add_(direction, alpha=-options["lr"])
        moment.mul_(beta2).add_(gradient, alpha=1 - beta2)

"""torch's optimizers that memory devices can run, and the coefficients of their rules for each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from coarse.client.update_settings import Rule
from coarse.torch.optim import Lion


class UpdateRule(Protocol):
    """One of torch's optimizers as sync cores run it."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """torch's names of each parameter's states, in the order of the native rule."""

    def settings(self, options: Mapping[str, Any], update_number: int) -> dict[str, float]:
        """The non-zero fields of SETTINGS_DTYPE for one parameter.

        Args:
            options: Options of its parameter group, in torch's format.
            update_number: 1 for the parameter's first update.
        """

    def num_updates(self, state: Mapping[str, Any]) -> int:
        """Number of updates in torch's state of a parameter; 0 or 1 for rules that do not count updates."""

    def counted(self, num_updates: int) -> Mapping[str, Any]:
        """The entries of torch's state in addition to `state_names`, after `num_updates` updates."""

    @property
    def has_state_at_once(self) -> bool:
        """Whether torch's state includes parameters that were never updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdRule:
    """torch.optim.SGD: the state is a momentum buffer, without an update count.

    Args:
        has_momentum: Whether any parameter group has momentum and thus a buffer.
    """

    has_momentum: bool
    has_state_at_once: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.has_momentum else ()

    def settings(self, options: Mapping[str, Any], update_number: int) -> dict[str, float]:
        momentum, is_first = float(options["momentum"]), update_number == 1
        if momentum and not self.has_momentum:
            raise ValueError(
                "this SGD had no momentum when it was given to DistributedOptimizer, so no memory device keeps its "
                "buffer; give each optimizer that will need momentum some from the start"
            )
        rule = Rule.SGD if not momentum else Rule.SGD_NESTEROV if options["nesterov"] else Rule.SGD_MOMENTUM
        return {
            "rule": rule,
            "gradient_scale": _sign(options),
            "gradient_decay": float(options["weight_decay"]),
            "parameter_scale": 1.0,
            "step_size": float(options["lr"]),
            # The first gradient becomes the buffer, without dampening.
            "first_decay": 0.0 if is_first else momentum,
            "first_weight": 1.0 if is_first else 1.0 - float(options["dampening"]),
            "momentum": momentum,
            "second_scale": 1.0,
            "update_number": update_number,
        }

    def num_updates(self, state: Mapping[str, Any]) -> int:
        # Without a buffer, an updated 16-bit parameter has master weights.
        return int(state.get("momentum_buffer" if self.has_momentum else "master") is not None)

    def counted(self, num_updates: int) -> dict[str, torch.Tensor]:
        return {}


class _CountsUpdates:
    """A rule whose optimizer stores the number of updates as torch does, in a scalar tensor `step`."""

    __slots__ = ()

    def num_updates(self, state: Mapping[str, Any]) -> int:
        return int(state.get("step", 0))

    def counted(self, num_updates: int) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(float(num_updates), dtype=torch.float32, device="cpu")}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamRule(_CountsUpdates):
    """torch.optim.Adam, and AdamW with decoupled weight decay.

    Args:
        is_amsgrad: Whether to use the largest second moment so far, not the current one.
    """

    is_amsgrad: bool = False
    has_state_at_once: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.is_amsgrad else ()))

    def settings(self, options: Mapping[str, Any], update_number: int) -> dict[str, float]:
        learning_rate, weight_decay = float(options["lr"]), float(options["weight_decay"])
        beta1, beta2 = map(float, options["betas"])
        is_decoupled = bool(options.get("decoupled_weight_decay"))
        return {
            "rule": Rule.AMSGRAD if self.is_amsgrad else Rule.ADAM,
            "gradient_scale": _sign(options),
            "gradient_decay": 0.0 if is_decoupled else weight_decay,
            "parameter_scale": 1.0 - learning_rate * weight_decay if is_decoupled else 1.0,
            "step_size": learning_rate / (1.0 - beta1**update_number),
            "first_weight": 1.0 - beta1,
            "second_decay": beta2,
            "second_weight": 1.0 - beta2,
            "second_scale": (1.0 - beta2**update_number) ** 0.5,
            "epsilon": float(options["eps"]),
            "update_number": update_number,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAdamRule:
    """torch.optim.SparseAdam: Adam for rows with a gradient; epsilon is added to the uncorrected moment."""

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    has_state_at_once: bool = False

    def settings(self, options: Mapping[str, Any], update_number: int) -> dict[str, float]:
        beta1, beta2 = map(float, options["betas"])
        corrections = (1.0 - beta2**update_number) ** 0.5 / (1.0 - beta1**update_number)
        return {
            "rule": Rule.ADAM,
            "gradient_scale": _sign(options),
            "parameter_scale": 1.0,
            "step_size": float(options["lr"]) * corrections,
            "first_weight": 1.0 - beta1,
            "second_decay": beta2,
            "second_weight": 1.0 - beta2,
            "second_scale": 1.0,
            "epsilon": float(options["eps"]),
            "update_number": update_number,
        }

    def num_updates(self, state: Mapping[str, Any]) -> int:
        return int(state.get("step", 0))

    def counted(self, num_updates: int) -> dict[str, Any]:
        return {"step": num_updates}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradRule(_CountsUpdates):
    """torch.optim.Adagrad, whose sums of squares begin with its initial_accumulator_value."""

    state_names: tuple[str, ...] = ("sum",)
    has_state_at_once: bool = True

    def settings(self, options: Mapping[str, Any], update_number: int) -> dict[str, float]:
        decay = 1.0 + (update_number - 1) * float(options["lr_decay"])
        return {
            "rule": Rule.ADAGRAD,
            "gradient_scale": _sign(options),
            "gradient_decay": float(options["weight_decay"]),
            "parameter_scale": 1.0,
            "step_size": float(options["lr"]) / decay,
            "epsilon": float(options["eps"]),
            "update_number": update_number,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LionRule:
    """coarse.torch.optim.Lion: the state is a first moment, without an update count."""

    state_names: tuple[str, ...] = ("exp_avg",)
    has_state_at_once: bool = False

    def settings(self, options: Mapping[str, Any], update_number: int) -> dict[str, float]:
        learning_rate = float(options["lr"])
        beta1, beta2 = map(float, options["betas"])
        return {
            "rule": Rule.LION,
            "gradient_scale": _sign(options),
            "parameter_scale": 1.0 - learning_rate * float(options["weight_decay"]),
            "step_size": learning_rate,
            "first_decay": beta1,
            "first_weight": 1.0 - beta1,
            "second_decay": beta2,
            "second_weight": 1.0 - beta2,
            "update_number": update_number,
        }

    def num_updates(self, state: Mapping[str, Any]) -> int:
        return int("exp_avg" in state)

    def counted(self, num_updates: int) -> dict[str, torch.Tensor]:
        return {}


KNOWN_OPTIMIZERS = "SGD, Adam, AdamW, Adagrad and SparseAdam of torch.optim, and coarse.torch.optim.Lion"
"""The optimizers that memory devices can run, for messages."""


_DENSE_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, Lion)


def cannot_update_rows(optimizer: torch.optim.Optimizer) -> str:
    """The reason why an optimizer cannot use sparse gradients; "" if it can.

    Refuses optimizers that torch refuses too, and momentum, which moves rows without a gradient.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)):
        return f"{name} does not update parameters by rows; SGD, Adagrad and SparseAdam do"
    for options in optimizer.param_groups:
        for option in ("momentum", "weight_decay"):
            if options.get(option):
                return f"{name}({option}={options[option]}) changes rows that have no gradient"
    return ""


def find_rule(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """The rule equivalent to `optimizer`; None if there is none, as for a subclass of torch's optimizers.

    Raises:
        ValueError: For an option of a known optimizer that its rule does not support; names it and the alternative.
    """
    kind = type(optimizer)
    known = (*_DENSE_OPTIMIZERS, torch.optim.SparseAdam)
    if kind not in known:
        return None
    for options in optimizer.param_groups:
        for option in ("differentiable", "capturable"):
            if options.get(option):
                raise ValueError(
                    f"{kind.__name__}({option}=True) cannot run in the memory devices; build it without "
                    f"{option}, or use it without DistributedOptimizer"
                )
    if kind is torch.optim.SGD:
        return SgdRule(has_momentum=any(options["momentum"] for options in optimizer.param_groups))
    if kind is torch.optim.Adagrad:
        return AdagradRule()
    if kind is Lion:
        return LionRule()
    if kind is torch.optim.SparseAdam:
        return SparseAdamRule()
    # In older versions of torch, only the class AdamW shows that decay is decoupled.
    if kind is torch.optim.AdamW:
        for options in optimizer.param_groups:
            options.setdefault("decoupled_weight_decay", True)
    are_amsgrad = {bool(options["amsgrad"]) for options in optimizer.param_groups}
    if len(are_amsgrad) > 1:
        raise ValueError(
            f"{kind.__name__} with amsgrad in some parameter groups and not in others cannot run in the memory "
            "devices; choose one for all, or use it without DistributedOptimizer"
        )
    return AdamRule(is_amsgrad=are_amsgrad.pop())


def _sign(options: Mapping[str, Any]) -> float:
    return -1.0 if options.get("maximize") else 1.0

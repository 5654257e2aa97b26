"""An optimizer's handling of the gradient norm, and of NaN and Inf in gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coarse.client.tensor_group import EVERYBODY
from coarse.errors import NonFiniteGradientError

OnNonFinite = Literal["ignore", "raise", "skip"]
_CHOICES = ("ignore", "raise", "skip")
_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
_MOST_NAMES_IN_MESSAGE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGradient:
    """Measurements of one parameter's averaged gradient, equal on every worker.

    Args:
        name: Name of the parameter.
        sum_of_squares: Sum over its elements.
        first_nonfinite: The first worker that had NaN or Inf in its own gradient; EVERYBODY if it is unknown or no
            worker had; None if the average is finite.
    """

    name: str
    sum_of_squares: float
    first_nonfinite: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPolicy:
    """Treatment of gradients before an update.

    Args:
        max_norm: Longer gradients (the 2-norm over all parameters) are scaled down to it; None for no limit.
        on_nonfinite: Reaction to NaN or Inf in an averaged gradient: "ignore" updates regardless, "raise" raises
            NonFiniteGradientError on every worker, "skip" leaves parameters and state unchanged.

    Raises:
        ValueError: If a value is out of range.
    """

    max_norm: float | None = None
    on_nonfinite: OnNonFinite = "ignore"

    def __post_init__(self) -> None:
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_norm} must be above 0; None clips nothing")
        if self.on_nonfinite not in _CHOICES:
            raise ValueError(f"on_nonfinite={self.on_nonfinite!r} is none of {', '.join(_CHOICES)}")

    @property
    def needs_measures(self) -> bool:
        """Whether the policy needs measurements of the gradients."""
        return self.max_norm is not None or self.on_nonfinite != "ignore"

    def admits(self, gradients: Sequence[MeasuredGradient]) -> bool:
        """Whether to update; False skips the step.

        Raises:
            NonFiniteGradientError: If a gradient is not finite and the policy is "raise"; names worker and parameter.
        """
        if self.on_nonfinite == "ignore":
            return True
        wrong = [gradient for gradient in gradients if gradient.first_nonfinite is not None]
        if wrong and self.on_nonfinite == "raise":
            raise NonFiniteGradientError(_nonfinite_message(wrong))
        return not wrong

    def scale(self, norm: float) -> float:
        """Factor for gradients with this 2-norm."""
        if self.max_norm is None:
            return 1.0
        scale = self.max_norm / (norm + _EPSILON)
        return scale if math.isnan(scale) else min(scale, 1.0)


def total_norm(gradients: Sequence[MeasuredGradient]) -> float:
    """The 2-norm over all gradients. The order of additions is fixed, so all workers get bitwise equal results."""
    return math.sqrt(sum(gradient.sum_of_squares for gradient in gradients))


def _nonfinite_message(wrong: Sequence[MeasuredGradient]) -> str:
    first = wrong[0]
    more = [gradient.name for gradient in wrong[1:_MOST_NAMES_IN_MESSAGE]]
    others = f" (also of {', '.join(map(repr, more))}" if more else ""
    if others:
        others += f" and {len(wrong) - 1 - len(more)} more)" if len(wrong) - 1 > len(more) else ")"
    where = f"the gradient of parameter {first.name!r}{others}"
    whose = (
        f"{where}, averaged over all workers, is not finite"
        if first.first_nonfinite == EVERYBODY
        else f"worker {first.first_nonfinite} contributed NaN or Inf to {where}"
    )
    return (
        f"{whose}. No worker has updated anything in this step. Look at that worker's batch and loss, lower the "
        'learning rate, or pass on_nonfinite="skip"'
    )

"""Keras's optimizers that memory devices can run, and the coefficients of their rules in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf

from coarse.client.update_settings import Rule

COEFFICIENTS = (
    "gradient_scale",
    "parameter_scale",
    "step_size",
    "first_decay",
    "first_weight",
    "momentum",
    "second_decay",
    "second_weight",
    "epsilon",
)
"""Fields of CoarseUpdateSettings for the op CoarseUpdate, in its order."""


class UpdateRule(Protocol):
    """One of Keras's optimizers as sync cores run it."""

    @property
    def number(self) -> Rule:
        """The sync cores' rule."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of each parameter's states, in the order of the native rule."""

    @property
    def state_attributes(self) -> tuple[str, ...]:
        """Attributes of Keras's optimizer that list each state of all parameters."""

    @property
    def state_signs(self) -> tuple[float, ...]:
        """Factor between Keras's value of each state and the native rule's, in both directions."""

    def coefficients(self, learning_rate: Any, step: Any) -> dict[str, Any]:
        """The non-zero coefficients, for gradients summed over the workers.

        Args:
            learning_rate: A float32 scalar; Keras computes coefficients in float32, too.
            step: A float32 scalar; 1 for the first update.
        """

    def saved_order(self, num_parameters: int) -> list[tuple[int, int]]:
        """Parameter and number of each state, in Keras's order of saving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdRule:
    """keras.optimizers.SGD, whose momentum includes the learning rate and is subtracted."""

    momentum: float
    number: Rule
    state_names: tuple[str, ...]
    state_attributes: tuple[str, ...] = ("momentums",)
    state_signs: tuple[float, ...] = (-1.0,)

    def coefficients(self, learning_rate: Any, step: Any) -> dict[str, Any]:
        del step
        return {
            "gradient_scale": learning_rate,
            "step_size": 1.0,
            "first_decay": self.momentum,
            "first_weight": 1.0,
            "momentum": self.momentum,
        }

    def saved_order(self, num_parameters: int) -> list[tuple[int, int]]:
        return [(index, 0) for index in range(num_parameters)] if self.state_names else []


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamRule:
    """keras.optimizers.Adam and AdamW; epsilon is added to the uncorrected moment."""

    beta_1: float
    beta_2: float
    epsilon: float
    number: Rule
    state_names: tuple[str, ...]
    state_attributes: tuple[str, ...] = ("_momentums", "_velocities", "_velocity_hats")
    state_signs: tuple[float, ...] = (1.0, 1.0, 1.0)

    def coefficients(self, learning_rate: Any, step: Any) -> dict[str, Any]:
        beta_1_power, beta_2_power = tf.pow(self.beta_1, step), tf.pow(self.beta_2, step)
        return {
            "gradient_scale": 1.0,
            "step_size": learning_rate * tf.sqrt(1.0 - beta_2_power) / (1.0 - beta_1_power),
            "first_weight": 1.0 - self.beta_1,
            "second_decay": self.beta_2,
            "second_weight": 1.0 - self.beta_2,
            "epsilon": self.epsilon,
        }

    def saved_order(self, num_parameters: int) -> list[tuple[int, int]]:
        moments = [(index, number) for index in range(num_parameters) for number in (0, 1)]
        return moments + [(index, 2) for index in range(num_parameters) if len(self.state_names) == 3]


def find_rule(optimizer: Any) -> UpdateRule | None:
    """The rule equivalent to `optimizer`; None if there is none, as for a subclass of Keras's optimizers."""
    kind = type(optimizer)
    if kind is keras.optimizers.SGD:
        if not optimizer.momentum:
            return SgdRule(momentum=0.0, number=Rule.SGD, state_names=())
        number = Rule.SGD_NESTEROV if optimizer.nesterov else Rule.SGD_MOMENTUM
        return SgdRule(momentum=float(optimizer.momentum), number=number, state_names=("momentum",))
    if kind in (keras.optimizers.Adam, keras.optimizers.AdamW):
        moments = ("momentum", "velocity")
        return AdamRule(
            beta_1=float(optimizer.beta_1),
            beta_2=float(optimizer.beta_2),
            epsilon=float(optimizer.epsilon),
            number=Rule.AMSGRAD if optimizer.amsgrad else Rule.ADAM,
            state_names=(*moments, "velocity_hat") if optimizer.amsgrad else moments,
        )
    return None

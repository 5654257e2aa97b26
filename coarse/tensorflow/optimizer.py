"""Keras's optimizers, with the update and its state in the memory devices."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from coarse.client.schema import TensorSpec
from coarse.tensorflow.operations import Operations
from coarse.tensorflow.strategy import Strategy
from coarse.tensorflow.update_rules import COEFFICIENTS, UpdateRule, find_rule

_METHODS = (
    "build",
    "_backend_update_step",
    "_apply_weight_decay",
    "save_own_variables",
    "load_own_variables",
)


def DistributedOptimizer(optimizer: Any) -> Any:  # noqa: N802 (takes the place of a class, as torch's does)
    """Has the memory devices run a Keras optimizer, where its state then lies once for all workers of the node.

    Gradients go to the memory devices, which update the parameters by their sum over the workers; each worker gets
    the updated parameters. What is assigned to a variable in between counts: worker 0's value is what is updated
    next. Clipping, gradient accumulation, moving averages, loss scaling and learning-rate schedules are Keras's own.
    A saved model has the state, and loads with or without COARSE.

    Args:
        optimizer: keras.optimizers.SGD, Adam or AdamW, built within strategy.scope(). Others, and where memory
            devices cannot run optimizers, stay on the workers, with a warning that says why.

    Returns:
        `optimizer` itself, to be given to model.compile() or used in a loop of one's own.

    Raises:
        ValueError: If it was not built within the scope of a coarse.tensorflow.Strategy.

    Example:
        >>> with strategy.scope():
        ...     model.compile(coarse.tensorflow.DistributedOptimizer(keras.optimizers.AdamW(1e-3)), "mse")
    """
    strategy = getattr(optimizer, "_distribution_strategy", None)
    if not isinstance(strategy, Strategy):
        raise ValueError(
            f"{type(optimizer).__name__} was built outside of the scope of a coarse.tensorflow.Strategy; build it "
            "within `with strategy.scope():`"
        )
    rule = find_rule(optimizer)
    if rule is None:
        known = "SGD, Adam and AdamW of keras.optimizers"
        _stays(optimizer, f"memory devices know {known}, not {type(optimizer).__name__}")
    elif reason := strategy.extended._cannot_update():
        _stays(optimizer, reason)
    else:
        OffloadedUpdates(optimizer, rule, strategy.extended._operations)
    return optimizer


class OffloadedUpdates:
    """What takes the place of methods of one Keras optimizer, as long as memory devices run it.

    Args:
        optimizer: From now on a part of its methods are those of this object.
        rule: What it does.
        operations: Of its strategy.
    """

    def __init__(self, optimizer: Any, rule: UpdateRule, operations: Operations) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._operations = operations
        self._group: Any = None
        self._keys: list[str] = []
        for name in _METHODS:  # not by the optimizer's own __setattr__, which would track what it is given
            object.__setattr__(optimizer, name, getattr(self, name.removeprefix("_")))
        if optimizer.built:
            self._take_over()

    def build(self, variables: Sequence[Any]) -> None:
        """As the optimizer's, but its states are made in the memory devices. Collective."""
        if self._optimizer.built:
            return
        if reason := _cannot_hold(variables):
            self._give_back()
            _stays(self._optimizer, reason)
            self._optimizer.build(variables)
            return
        BaseOptimizer.build(self._optimizer, variables)
        self._rule.forget_states(self._optimizer)
        self._register(variables)

    def backend_update_step(self, grads: Sequence[Any], trainable_variables: Any, learning_rate: Any) -> None:
        """Has the memory devices update variables; returns, in a graph, when they are to be assigned."""
        variables = [getattr(variable, "value", variable) for variable in trainable_variables]
        rate = tf.cast(tf.convert_to_tensor(learning_rate), tf.float32)
        step = tf.cast(self._optimizer.iterations, tf.int64) + 1
        coefficients = self._rule.coefficients(rate, tf.cast(step, tf.float32))
        # Memory devices average; Keras has divided the loss by the number of workers.
        coefficients["gradient_scale"] *= float(self._operations.num_workers)
        kept = _packed({**coefficients, "parameter_scale": 1.0})
        decay = self._optimizer.weight_decay
        decayed = kept if decay is None else _packed({**coefficients, "parameter_scale": 1.0 - rate * decay})
        updates = [
            (
                self._keys[self._optimizer._get_variable_index(variable)],
                tf.cast(tf.convert_to_tensor(gradient), variable.dtype),
                variable,
                decayed if self._optimizer._use_weight_decay(variable) else kept,
            )
            for gradient, variable in zip(grads, variables, strict=True)
        ]
        for variable, value in zip(
            variables, self._operations.update(self._rule.number, step, updates), strict=True
        ):
            variable.assign(value)

    def apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Nothing: it is a part of the update."""

    def save_own_variables(self, store: Any) -> None:
        """As the optimizer's, with the states that memory devices have; loads into one that has its own."""
        own = self._optimizer.variables
        for i, variable in enumerate(own):
            store[str(i)] = variable.numpy()
        for i, (index, number) in enumerate(self._order(), len(own)):
            store[str(i)] = self._state(index, number) * self._rule.state_signs[number]

    def load_own_variables(self, store: Any) -> None:
        """As the optimizer's; every worker loads the same."""
        own, order = self._optimizer.variables, self._order()
        if len(store.keys()) != len(own) + len(order):
            warnings.warn(
                f"skipping the state of optimizer {self._optimizer.name!r}: it has {len(own) + len(order)} "
                f"variables, and {len(store.keys())} were saved",
                stacklevel=2,
            )
            return
        for i, variable in enumerate(own):
            variable.assign(store[str(i)])
        if self._operations.rank != 0:
            return
        for i, (index, number) in enumerate(order, len(own)):
            self._state(index, number)[...] = np.asarray(store[str(i)]) * self._rule.state_signs[number]

    def _order(self) -> list[tuple[int, int]]:
        return self._rule.saved_order(len(self._keys))

    def _register(self, variables: Sequence[Any]) -> None:
        specs = [
            TensorSpec(
                name=f"{i} {variable.name}",
                dtype="float32",
                num_elements=int(np.prod(variable.shape, dtype=np.int64)),
                op="mean",
            )
            for i, variable in enumerate(variables)
        ]
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._group, self._keys = self._operations.register_parameters(
            f"optimizer {self._optimizer.name}", specs, self._rule.state_names
        )

    def _state(self, index: int, number: int) -> Any:
        """A state of a parameter where it lies, with its shape."""
        state = np.frombuffer(self._group.state(index, number), np.float32)
        return state.reshape(self._shapes[index])

    def _take_over(self) -> None:
        """Moves the state that the optimizer has to the memory devices."""
        variables = list(self._optimizer._trainable_variables)
        if reason := _cannot_hold(variables):
            self._give_back()
            _stays(self._optimizer, reason)
            return
        values = {str(i): variable.numpy() for i, variable in enumerate(self._optimizer.variables)}
        for state in self._rule.forget_states(self._optimizer):
            self._optimizer._untrack_variable(state)
        self._register(variables)
        self.load_own_variables(values)

    def _give_back(self) -> None:
        for name in _METHODS:
            object.__delattr__(self._optimizer, name)


def _packed(coefficients: dict[str, Any]) -> Any:
    """Coefficients as the op takes them."""
    return tf.stack([tf.cast(coefficients.get(name, 0.0), tf.float32) for name in COEFFICIENTS])


def _cannot_hold(variables: Sequence[Any]) -> str:
    """Why memory devices cannot have these parameters; "" if they can."""
    for variable in variables:
        if tf.as_dtype(variable.dtype) != tf.float32:
            return (
                f"variable {variable.name!r} is {tf.as_dtype(variable.dtype).name}, and they update float32"
            )
        if getattr(variable, "overwrite_with_gradient", False):
            return f"variable {variable.name!r} is overwritten with its gradient"
        if not all(variable.shape):
            return f"variable {variable.name!r} is empty"
    return ""


def _stays(optimizer: Any, reason: str) -> None:
    warnings.warn(
        f"{type(optimizer).__name__} runs on the workers, not in the memory devices: {reason}", stacklevel=3
    )

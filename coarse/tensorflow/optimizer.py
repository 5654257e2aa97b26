"""Keras's optimizers, with the update and its state in the memory devices."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.utils.tracking import DotNotTrackScope
from tensorflow.python.trackable.base import SaveType

from coarse.schema import TensorSpec
from coarse.tensorflow.device_state import DeviceState, FloatArray, StatePlace
from coarse.tensorflow.operations import Operations
from coarse.tensorflow.strategy import Strategy
from coarse.tensorflow.update_rules import COEFFICIENTS, UpdateRule, find_rule

logger = logging.getLogger(__name__)

_METHODS = ("build", "_backend_update_step", "_apply_weight_decay", "_trackable_children")


def DistributedOptimizer(optimizer: Any) -> Any:  # noqa: N802 (takes the place of a class, as torch's does)
    """Runs a Keras optimizer in the memory devices, which store one copy of its state for all workers of the node.

    Gradients go to the memory devices, which update the parameters by their sum over the workers; each worker gets
    the updated parameters. Assignments to a variable between updates take effect: the next update starts from the
    value of a node's first worker. Clipping, gradient accumulation, moving averages, loss scaling and learning-rate
    schedules are Keras's own. Saved models and checkpoints include the state in Keras's format, and load with or
    without COARSE.

    Args:
        optimizer: keras.optimizers.SGD, Adam or AdamW, built within strategy.scope(), or a LossScaleOptimizer around
            one. Other optimizers stay on the workers, with a warning that gives the reason. So do all optimizers if
            memory devices cannot run them.

    Returns:
        `optimizer` itself, for model.compile() or a custom loop.

    Raises:
        ValueError: If it was not built within the scope of a coarse.tensorflow.Strategy.

    Example:
        >>> with strategy.scope():
        ...     model.compile(coarse.tensorflow.DistributedOptimizer(keras.optimizers.AdamW(1e-3)), "mse")
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        is_class = isinstance(optimizer, type)
        what = f"the class {optimizer.__name__}" if is_class else f"a {type(optimizer).__name__}"
        raise TypeError(
            f"DistributedOptimizer needs one of Keras's optimizers, such as keras.optimizers.Adam(), not {what}"
        )
    strategy = getattr(optimizer, "_distribution_strategy", None)
    if not isinstance(strategy, Strategy):
        raise ValueError(
            f"{type(optimizer).__name__} was built outside of the scope of a coarse.tensorflow.Strategy; build it "
            "within `with strategy.scope():`"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        DistributedOptimizer(optimizer.inner_optimizer)
        return optimizer
    rule = find_rule(optimizer)
    if rule is None:
        known = "SGD, Adam and AdamW of keras.optimizers"
        _stays(optimizer, f"memory devices support {known}, not {type(optimizer).__name__}")
    elif reason := strategy.extended._cannot_update():
        _stays(optimizer, reason)
    else:
        RemoteUpdates(optimizer, rule, strategy.extended._operations)
    return optimizer


class RemoteUpdates:
    """Replaces methods of one Keras optimizer while memory devices run it.

    Args:
        optimizer: The optimizer, some of whose methods are replaced by this object's.
        rule: The optimizer's update rule.
        operations: Operations of its strategy.
    """

    def __init__(self, optimizer: Any, rule: UpdateRule, operations: Operations) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._operations = operations
        self._group: Any = None
        self._keys: list[str] = []
        self._has_told_of_rows = False
        for name in _METHODS:  # bypasses the optimizer's own __setattr__, which would track the value
            object.__setattr__(optimizer, name, getattr(self, name.removeprefix("_")))
        if optimizer.built:
            self._take_over()

    def build(self, variables: Sequence[Any]) -> None:
        """As the optimizer's build(), but creates the states in the memory devices. Collective."""
        if self._optimizer.built:
            return
        if reason := _cannot_hold(variables):
            self._give_back()
            _stays(self._optimizer, reason)
            self._optimizer.build(variables)
            return
        BaseOptimizer.build(self._optimizer, variables)
        self._register(variables)
        self._track_states(variables)

    def backend_update_step(self, grads: Sequence[Any], trainable_variables: Any, learning_rate: Any) -> None:
        """Updates variables in the memory devices and assigns the results."""
        self._tell_of_rows(grads)
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

    def _tell_of_rows(self, grads: Sequence[Any]) -> None:
        """Logs once, on the first worker, which gradients arrive as rows and are transferred as whole tensors."""
        tables = [each for each in grads if isinstance(each, tf.IndexedSlices)]
        if not tables or self._has_told_of_rows or self._operations.rank != 0:
            return
        self._has_told_of_rows = True
        shapes = [tf.get_static_value(table.dense_shape) for table in tables]
        whole_mib = (
            sum(4 * int(np.prod(shape, dtype=np.int64)) for shape in shapes if shape is not None) / 2**20
        )
        logger.warning(
            "coarse.tensorflow: %d gradients of rows (IndexedSlices) are sent to the memory devices as whole "
            "tensors, %.1f MiB per update and worker, because %s in the memory devices updates whole parameters. "
            "Without DistributedOptimizer, only the rows are sent.",
            len(tables),
            whole_mib,
            type(self._optimizer).__name__,
        )

    def apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Does nothing: weight decay is part of the update."""

    def trackable_children(self, save_type: str = SaveType.CHECKPOINT, **kwargs: Any) -> dict[str, Any]:
        """As the optimizer's; a SavedModel has no states, because its functions must run without memory devices."""
        kind = type(self._optimizer)
        children: dict[str, Any] = kind._trackable_children(self._optimizer, save_type, **kwargs)
        if save_type == SaveType.SAVEDMODEL:
            return {name: child for name, child in children.items() if not _has_states(child)}
        return children

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
        self._group, self._keys = self._operations.register_parameters(
            f"optimizer {self._optimizer.name}", specs, self._rule.state_names, owner=self
        )

    def _track_states(self, variables: Sequence[Any]) -> None:
        """Tracks states in place of the Keras optimizer's own, which also restores them from a checkpoint."""
        states = {
            (index, number): self._state(index, number, variable)
            for index, variable in enumerate(variables)
            for number in range(len(self._rule.state_names))
        }
        for place in self._rule.saved_order(len(variables)):
            self._optimizer._tracker.add_to_store("variables", states[place])
        numbers = range(len(self._rule.state_names))
        for number, attribute in zip(numbers, self._rule.state_attributes, strict=False):
            setattr(self._optimizer, attribute, [states[index, number] for index in range(len(variables))])

    def _state(self, index: int, number: int, variable: Any) -> DeviceState:
        def map_memory() -> FloatArray:
            memory: FloatArray = np.ndarray(
                tuple(variable.shape), np.float32, self._group.state(index, number)
            )
            return memory

        place = StatePlace(
            map_memory=map_memory,
            sign=self._rule.state_signs[number],
            writes=self._operations.writes_for_node,
        )
        return DeviceState(self._rule.state_names[number], variable, self._optimizer.name, place)

    def _take_over(self) -> None:
        """Moves the optimizer's existing state to the memory devices."""
        variables = list(self._optimizer._trainable_variables)
        if reason := _cannot_hold(variables):
            self._give_back()
            _stays(self._optimizer, reason)
            return
        values = [variable.numpy() for variable in self._optimizer.variables]
        self._forget_states()
        self._register(variables)
        self._track_states(variables)
        for variable, value in zip(self._optimizer.variables, values, strict=True):
            variable.assign(value)

    def _forget_states(self) -> None:
        """Removes the Keras optimizer's own states."""
        optimizer = self._optimizer
        for attribute in self._rule.state_attributes:
            for state in getattr(optimizer, attribute, []):
                optimizer._untrack_variable(state)
        # A new list, because TensorFlow cannot write a checkpoint of a list from which an element was removed.
        is_variable, kept = optimizer._tracker.config["variables"]
        with DotNotTrackScope():
            optimizer._variables = list(kept)
        optimizer._tracker.config["variables"] = is_variable, optimizer._variables

    def _give_back(self) -> None:
        for name in _METHODS:
            object.__delattr__(self._optimizer, name)


def _has_states(child: Any) -> bool:
    return isinstance(child, list) and any(isinstance(each, DeviceState) for each in child)


def _packed(coefficients: dict[str, Any]) -> Any:
    """Coefficients in the op's format."""
    return tf.stack([tf.cast(coefficients.get(name, 0.0), tf.float32) for name in COEFFICIENTS])


def _cannot_hold(variables: Sequence[Any]) -> str:
    """The reason why memory devices cannot hold these parameters; "" if they can."""
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

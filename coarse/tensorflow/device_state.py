"""Optimizer states in the memory devices, in the form of variables for Keras and tf.train.Checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.checkpoint.tensor_callable import Callable as TensorCallable
from tensorflow.python.distribute.device_util import canonicalize
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY, Trackable

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlace:
    """The location of a state, and its differences from Keras's.

    Args:
        map_memory: Maps its memory, float32 with the parameter's shape, which all workers of the node share.
        sign: Factor between Keras's value and the memory devices', in both directions; 1 or -1.
        writes: Whether this worker's assignments take effect for its node; only those of the node's first worker do.
    """

    map_memory: Callable[[], FloatArray]
    sign: float
    writes: bool


class DeviceState(Trackable):  # type: ignore[misc,unused-ignore]
    """A momentum or moment of a parameter in the memory devices: a variable that is not on this worker.

    It has the same place and name in its optimizer's `variables` and in checkpoints as Keras's own state, so files
    are equal. Like a variable, it must be read and assigned while no update is running. Assignments by a node's first
    worker apply to the node after the workers have synchronised, as in the next update.

    Args:
        name: Keras's name of the state, such as "momentum".
        variable: The Keras variable to which it belongs.
        optimizer_name: Name of its optimizer.
        place: Its location.
    """

    trainable = False
    dtype = "float32"

    def __init__(self, name: str, variable: Any, optimizer_name: str, place: StatePlace) -> None:
        reference = str(getattr(variable, "path", variable.name)).replace("/", "_").replace(":", "_")
        self.name = f"{reference}_{name}"
        self.path = f"{optimizer_name}/{self.name}"
        self.shape = tf.TensorShape(variable.shape)
        self._place = place

    def __repr__(self) -> str:
        return f"<DeviceState path={self.path}, shape={tuple(self.shape)}, in the memory devices>"

    def numpy(self) -> FloatArray:
        """A copy, with Keras's sign."""
        value: FloatArray = self._place.map_memory() * np.float32(self._place.sign)
        return value

    @property
    def value(self) -> Any:
        """A tensor of the current value; in a graph, of the value when the graph runs."""
        if tf.executing_eagerly():
            return tf.constant(self.numpy())
        value = tf.numpy_function(self.numpy, [], tf.float32)
        value.set_shape(self.shape)
        return value

    def assign(self, value: Any) -> Any:
        """Assigns `value` for the node if this is its first worker; does nothing on other workers.

        Args:
            value: Has the same shape.

        Returns:
            In a graph, the assigning operation.

        Raises:
            ValueError: If shapes differ.
        """
        if tf.is_tensor(value) and not hasattr(value, "numpy"):
            return tf.numpy_function(self._write, [value], [])
        self._write(np.asarray(value))
        return None

    def _write(self, value: npt.NDArray[Any]) -> None:
        if value.shape != tuple(self.shape):
            raise ValueError(f"{self.path} has shape {tuple(self.shape)}, but was assigned {value.shape}")
        if self._place.writes:
            np.multiply(
                value, np.float32(self._place.sign), out=self._place.map_memory(), casting="same_kind"
            )

    def _serialize_to_tensors(self) -> dict[str, Any]:
        # The full device name, as for variables: checkpoints of several devices are written through a graph.
        return {VARIABLE_VALUE_KEY: TensorCallable(lambda: self.value, tf.float32, canonicalize("/CPU:0"))}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        return self.assign(restored_tensors[VARIABLE_VALUE_KEY])

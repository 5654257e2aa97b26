"""The TensorFlow op that reduces tensors in graphs."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, ops

from coarse.env import compiler_command
from coarse.tensorflow.collectives import Collectives
from coarse.tensorflow.op_library import KernelBuildError, build_library, prebuilt_path

logger = logging.getLogger(__name__)

_UNORDERED = frozenset(
    {"CoarseReduce", "CoarseReduceWeighted", "CoarseReduceRows", "CoarseReduceRowsWeighted", "CoarseUpdate"}
)
"""Stateful ops that each tf.function may run concurrently, as with TensorFlow's own collectives."""


class ReduceKernel:
    """The op CoarseReduce of one session.

    Args:
        library: Result of load_library().
        collectives: The session's collectives.
        number: Distinguishes the sessions of this process.

    Raises:
        KernelBuildError: If the library belongs to another version of COARSE.
    """

    def __init__(self, library: Path, collectives: Collectives, number: int) -> None:
        auto_control_deps.ASYNC_STATEFUL_OPS |= _UNORDERED
        self._ops = tf.load_op_library(str(library))
        self._functions = ctypes.CDLL(str(library))
        self._number = number
        self._functions.coarse_open_endpoint.argtypes = (ctypes.c_int64, *3 * (ctypes.c_void_p,))
        self._functions.coarse_close_endpoint.argtypes = (ctypes.c_int64,)
        if not self._functions.coarse_open_endpoint(
            number, collectives.interface, collectives.rows_interface, collectives.updates_interface
        ):
            raise KernelBuildError(f"{library} was built for another version of COARSE; remove it")

    def reduce(self, tensors: Sequence[Any], keys: Sequence[str], weights: Any = None) -> list[Any]:
        """Reduces tensors in a graph, each separately; all are reduced when the graph has run.

        Args:
            tensors, keys: The tensors and their keys.
            weights: As for Operations.reduce().
        """
        results = []
        for tensor, key in zip(tensors, keys, strict=True):
            with tf.device(_place_of(tensor)):
                results.append(self._reduced(tensor, key, weights))
        with tf.control_dependencies(results), tf.device(results[0].device):
            self._ops.coarse_sequence()
        return results

    def _reduced(self, tensor: Any, key: str, weights: Any) -> Any:
        given = {"contribution": tensor, "key": key, "endpoint": self._number}
        if weights is None:
            return self._ops.coarse_reduce(**given)
        return self._ops.coarse_reduce_weighted(weights=weights, **given)

    def reduce_rows(self, values: Any, numbers: Any, key: str, weights: Any = None) -> tuple[Any, Any]:
        """Reduces rows of a sparse gradient; returns all workers' rows and their numbers, ascending without repeats.

        Args:
            values, numbers, key: The rows, their numbers, and the key of their table.
            weights: As for Operations.reduce().
        """
        given = {"contribution": values, "rows": numbers, "key": key, "endpoint": self._number}
        results = (
            self._ops.coarse_reduce_rows(**given)
            if weights is None
            else self._ops.coarse_reduce_rows_weighted(weights=weights, **given)
        )
        if ops.inside_function():
            with tf.control_dependencies(results):
                self._ops.coarse_sequence()
        return results.result, results.result_rows

    def update(self, rule: int, step: Any, updates: Sequence[tuple[str, Any, Any, Any]]) -> list[Any]:
        """Updates parameters; returns each once it is updated.

        Args:
            rule: Number of the update rule.
            step: A scalar of int64; 1 for the first update.
            updates: Key, gradient, current value and coefficients of each parameter.
        """
        results = [
            self._ops.coarse_update(
                gradient=gradient,
                value=value,
                coefficients=coefficients,
                step=step,
                rule=rule,
                key=key,
                endpoint=self._number,
            )
            for key, gradient, value, coefficients in updates
        ]
        if ops.inside_function():
            with tf.control_dependencies(results):
                self._ops.coarse_sequence()
        return results

    def close(self) -> None:
        """Makes running ops fail. Idempotent."""
        self._functions.coarse_close_endpoint(self._number)


def _place_of(tensor: Any) -> str:
    """Where a graph reduces a tensor: on the GPU that computes it, or else on the processor."""
    # TensorFlow keeps most integers in the memory of the host, also for ops of a GPU.
    is_on_gpu = "GPU" in tensor.device and tensor.dtype.is_floating
    return str(tensor.device) if is_on_gpu else "/CPU:0"


def load_kernel(collectives: Collectives, number: int) -> ReduceKernel | None:
    """Returns the op of the wheel, or builds it if necessary; returns None with a warning if it cannot be built.

    Args:
        collectives: The session's collectives.
        number: Distinguishes the sessions of this process.
    """
    try:
        return _prebuilt_kernel(collectives, number) or ReduceKernel(
            build_library(" ".join(compiler_command()) or "g++"), collectives, number
        )
    except (KernelBuildError, OSError, tf.errors.NotFoundError) as error:
        logger.warning(
            "coarse.tensorflow: tensors are reduced through Python, which is slower, because the op cannot be "
            "built: %s",
            error,
        )
        return None


def _prebuilt_kernel(collectives: Collectives, number: int) -> ReduceKernel | None:
    """The op that the wheel has for this TensorFlow; None if it has none, or if that cannot be loaded."""
    path = prebuilt_path()
    if not path.exists():
        return None
    try:
        return ReduceKernel(path, collectives, number)
    except (OSError, tf.errors.NotFoundError) as error:
        logger.warning(
            "coarse.tensorflow: the op is built here, because that of the wheel does not load: %s", error
        )
        return None

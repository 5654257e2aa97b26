"""Collective operations on tensors, eager or in a graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from coarse.client.tensor_group import TensorGroup
from coarse.schema import TensorSpec
from coarse.tensorflow.collectives import (
    DEFAULT_CHANNEL,
    Array,
    Collectives,
    add_up,
    can_reduce,
    compensation,
)
from coarse.tensorflow.kernel import ReduceKernel
from coarse.tensorflow.names import CollectiveNames

_CAST_TO = {
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}


class Operations:
    """Collective operations of the workers of one strategy.

    Args:
        collectives: Runs the operations.
        kernel: Runs them in graphs, so that tensors overlap with computation and each other; None to use Python.
    """

    def __init__(self, collectives: Collectives, kernel: ReduceKernel | None) -> None:
        self._collectives = collectives
        self._kernel = kernel
        self._names = CollectiveNames()
        self._last_calls: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def reduce(self, op: str, tensors: Sequence[Any], name: str = "", weights: Any = None) -> list[Any]:
        """Sums or averages tensors over all workers.

        Args:
            op: "sum" or "mean"; a mean of integers is rounded towards zero.
            tensors: Have the same shapes and dtypes on all workers.
            name: Name for reductions outside of functions.
            weights: Weights of all workers by rank, float64, if the results are weighted sums; None for others. Where
                a worker is lost before it has contributed, its weight goes to those that have.
        """
        if not tensors:
            return []
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        wide = [self._widened(op, tensor) for tensor in tensors]
        name = name or self._names.next()
        with tf.device("/CPU:0"):
            reduced: list[Any] = [None] * len(wide)
            for kind in ("mean", "sum"):
                chosen = [i for i, each in enumerate(wide) if _kind(op, each) == kind]
                results = self._reduce_alike(name, kind, [wide[i] for i in chosen], weights)
                for i, result in zip(chosen, results, strict=True):
                    reduced[i] = result
        return [self._narrowed(op, each, tensor) for each, tensor in zip(reduced, tensors, strict=True)]

    def reduce_slices(self, op: str, slices: Any, weights: Any = None) -> Any:
        """Sums or averages rows of a sparse gradient over all workers.

        If memory devices cannot reduce rows, the rows of all workers are gathered, and the consumer sums up repeated
        rows.

        Args:
            op: "sum" or "mean".
            slices: tf.IndexedSlices with the same dense shape and dtype on all workers.
            weights: As for reduce().
        """
        key = self._key_of_table(op, slices)
        if not key:
            return self._gather_slices(op, slices, weights)
        assert self._kernel is not None
        with tf.device("/CPU:0"):
            rows = tf.cast(slices.indices, tf.int64)
            values, numbers = self._kernel.reduce_rows(slices.values, rows, key, weights)
        return tf.IndexedSlices(values, tf.cast(numbers, slices.indices.dtype), slices.dense_shape)

    @property
    def has_kernel(self) -> bool:
        """Whether the op is available; memory devices need it to update parameters."""
        return self._kernel is not None

    @property
    def may_lose_workers(self) -> bool:
        """Whether the job goes on without lost workers."""
        return self._collectives.may_lose_workers

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self._collectives.rank

    @property
    def writes_for_node(self) -> bool:
        """Whether this worker writes the memory that all workers of the node share."""
        return self._collectives.writes_for_node

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._collectives.num_workers

    def register_parameters(
        self, name: str, specs: Sequence[TensorSpec], state_names: Sequence[str], owner: Any
    ) -> tuple[TensorGroup, list[str]]:
        """As Collectives.register_parameters()."""
        return self._collectives.register_parameters(name, specs, state_names, owner)

    def update(self, rule: int, step: Any, updates: Sequence[tuple[str, Any, Any, Any]]) -> list[Any]:
        """As ReduceKernel.update()."""
        assert self._kernel is not None
        with tf.device("/CPU:0"):
            return self._kernel.update(rule, step, updates)

    def gather(self, tensor: Any) -> Any:
        """The tensors of all workers, concatenated by rank along their first dimension."""
        name = self._names.next()
        channel = self._channel(name)

        def gather(array: Array) -> Array:
            return np.concatenate(list(self._collectives.gather(name, array, channel).values()))

        with tf.device("/CPU:0"):
            tensor = tf.convert_to_tensor(tensor)
            if not can_reduce(tensor.dtype.name) and tensor.dtype in (tf.string, tf.variant, tf.resource):
                raise ValueError(
                    f"tensors of {tensor.dtype.name} cannot be gathered from workers; gather numbers"
                )
            gathered = self._call(gather, [tensor], [tensor.dtype])[0]
        gathered.set_shape([None, *tensor.shape[1:]])
        return gathered

    def broadcast(self, what: str, tensor: Any) -> Any:
        """Returns the tensor of the first worker that is not lost on all workers.

        Args:
            what: Name of the operation, for errors.
            tensor: Has the same shape and dtype on each worker.
        """
        with tf.device("/CPU:0"):
            tensor = tf.convert_to_tensor(tensor)
            channel = self._channel(self._names.next())
            result = self._call(
                lambda array: self._collectives.broadcast(what, array, channel), [tensor], [tensor.dtype]
            )[0]
        result.set_shape(tensor.shape)
        return result

    def _key_of_table(self, op: str, slices: Any) -> str:
        shape = None if slices.dense_shape is None else tf.get_static_value(slices.dense_shape)
        if self._kernel is None or shape is None or shape.size == 0 or not shape.all():
            return ""
        num_rows, row_elements = int(shape[0]), int(np.prod(shape[1:], dtype=np.int64))
        name = f"{self._names.next()} rows"
        return self._collectives.key_of_table(
            name, op, slices.values.dtype.name, num_rows, row_elements, self._names.graphs()
        )

    def _gather_slices(self, op: str, slices: Any, weights: Any) -> Any:
        name = self._names.next()
        channel = self._channel(name)

        def gather(values: Array, indices: Array, *weights: Array) -> list[Array]:
            # Together, so that the same workers contribute to all.
            rows = self._collectives.gather(name, _rows_as_bytes(values, indices), channel)
            gathered, numbers = _bytes_as_rows(np.concatenate(list(rows.values())), values, indices)
            if op == "mean":
                gathered = gathered / len(rows)
            elif weights:
                gathered = gathered * compensation(rows, *weights)
            return [gathered.astype(values.dtype), numbers]

        own = [slices.values, slices.indices]
        with tf.device("/CPU:0"):
            given = own if weights is None else [*own, weights]
            values, indices = self._call(gather, given, [each.dtype for each in own])
        values.set_shape([None, *slices.values.shape[1:]])
        indices.set_shape([None])
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def _reduce_alike(self, name: str, op: str, tensors: list[Any], weights: Any) -> list[Any]:
        results = list(tensors)
        known = [i for i, tensor in enumerate(tensors) if tensor.shape.is_fully_defined()]
        reduced = self._reduce_of_known_shape(name, op, [tensors[i] for i in known], weights)
        for i, result in zip(known, reduced, strict=True):
            results[i] = result
        for i in (i for i in range(len(tensors)) if i not in known):
            results[i] = self._reduce_of_any_shape(f"{name}, {i}", op, tensors[i], weights)
        return results

    def _reduce_of_known_shape(self, name: str, op: str, tensors: list[Any], weights: Any) -> list[Any]:
        if not tensors:
            return []
        if self._kernel is not None and ops.inside_function():
            return self._reduce_by_kernel(self._kernel, name, op, tensors, weights)

        def reduce(*arrays: Array) -> list[Array]:
            of_workers = () if weights is None else arrays[len(tensors)].tolist()
            return self._collectives.reduce(name, op, arrays[: len(tensors)], of_workers)

        if ops.inside_function():  # graphs run in different orders, in which workers could not register
            full = [tensor for tensor in tensors if tensor.shape.num_elements()]
            signatures = [(each.dtype.name, each.shape.num_elements()) for each in full]
            self._collectives.keys_of(name, op, signatures, self._names.graphs())
        given = tensors if weights is None else [*tensors, weights]
        results = self._call(reduce, given, [tensor.dtype for tensor in tensors])
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)
        return results

    def _reduce_by_kernel(
        self, kernel: ReduceKernel, name: str, op: str, tensors: list[Any], weights: Any
    ) -> list[Any]:
        full = [i for i, tensor in enumerate(tensors) if tensor.shape.num_elements()]
        signatures = [(tensors[i].dtype.name, tensors[i].shape.num_elements()) for i in full]
        results = list(tensors)
        if full:
            keys = self._collectives.keys_of(name, op, signatures, self._names.graphs())
            reduced = kernel.reduce([tensors[i] for i in full], keys, weights)
            for i, result in zip(full, reduced, strict=True):
                results[i] = result
        return results

    def _reduce_of_any_shape(self, name: str, op: str, tensor: Any, weights: Any) -> Any:
        """Reduces a tensor whose shape is unknown before it is computed: gathers all workers' and sums them here."""
        channel = self._channel(name)

        def reduce(array: Array, *weights: Array) -> Array:
            parts = self._collectives.gather(name, array[np.newaxis], channel)
            total: Array = add_up(parts, op, *weights)[0]
            return total

        given = [tensor] if weights is None else [tensor, weights]
        result = self._call(reduce, given, [tensor.dtype])[0]
        result.set_shape(tensor.shape)
        return result

    def _channel(self, name: str) -> str:
        if not ops.inside_function():
            return DEFAULT_CHANNEL
        channel = f"{DEFAULT_CHANNEL} {name}"
        self._collectives.open_channel(channel, self._names.graphs())
        return channel

    def _call(self, function: Callable[..., Any], tensors: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
        """Calls a function of arrays: now, or at each run of the graph, in the order of construction."""
        if not ops.inside_function():
            results = function(*(_array_of(tensor) for tensor in tensors))
            self._collectives.note_losses()
            return [
                tf.convert_to_tensor(each) for each in (results if isinstance(results, list) else [results])
            ]
        graph = ops.get_default_graph()
        # Calls block TensorFlow's threads, so with different orders workers would wait for each other.
        last = self._last_calls.get(graph)  # its name; the operation itself would keep the graph alive
        with tf.control_dependencies([] if last is None else [graph.get_operation_by_name(last)]):
            results = tf.numpy_function(function, list(tensors), list(dtypes), stateful=True)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        self._last_calls[graph] = results[0].op.name
        return results

    def _widened(self, op: str, tensor: Any) -> Any:
        widened = _widened(tensor)
        # Memory devices average floating-point numbers only, and know the number of contributors.
        is_average = self.may_lose_workers and op == "mean" and widened.dtype.is_integer
        return tf.cast(widened, tf.float64) if is_average else widened

    def _narrowed(self, op: str, reduced: Any, tensor: Any) -> Any:
        if op == "mean" and not tensor.dtype.is_floating and not tensor.dtype.is_complex:
            if reduced.dtype.is_integer:
                reduced = tf.math.truediv(reduced, self._collectives.num_workers)
            reduced = tf.cast(reduced, _CAST_TO.get(tensor.dtype, tensor.dtype))
        if tensor.dtype.is_complex:
            return tf.complex(reduced[..., 0], reduced[..., 1])
        return reduced if reduced.dtype == tensor.dtype else tf.cast(reduced, tensor.dtype)


def _widened(tensor: Any) -> Any:
    if tensor.dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], axis=-1)
    widened = tf.cast(tensor, _CAST_TO[tensor.dtype]) if tensor.dtype in _CAST_TO else tensor
    if not can_reduce(widened.dtype.name):
        raise ValueError(f"tensors of {tensor.dtype.name} cannot be reduced over the workers; reduce numbers")
    return widened


def _rows_as_bytes(values: Array, indices: Array) -> Array:
    """The bytes of each row, followed by those of its number."""
    numbers = np.ascontiguousarray(indices)[:, np.newaxis].view(np.uint8)
    elements = int(np.prod(values.shape[1:], dtype=np.int64))
    rows = np.ascontiguousarray(values).reshape(len(values), elements).view(np.uint8)
    return np.concatenate([rows, numbers], axis=1)


def _bytes_as_rows(rows: Array, values: Array, indices: Array) -> tuple[Array, Array]:
    """The rows and their numbers, of the dtypes of `values` and `indices`."""
    end = rows.shape[1] - indices.dtype.itemsize
    gathered = np.ascontiguousarray(rows[:, :end]).view(values.dtype).reshape(-1, *values.shape[1:])
    return gathered, np.ascontiguousarray(rows[:, end:]).view(indices.dtype)[:, 0]


def _kind(op: str, tensor: Any) -> str:
    return "mean" if op == "mean" and tensor.dtype.is_floating else "sum"


def _array_of(tensor: Any) -> Array:
    array: Array = np.asarray(tensor.numpy())
    return array

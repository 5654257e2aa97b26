"""The client of a job of one worker: no synchronisation, no other process, no shared memory."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from coarse.client.memory.parameter_storage import StorageSnapshot
from coarse.client.memory.stored_value import StoredValue
from coarse.errors import SessionClosedError
from coarse.kernels import _native
from coarse.metrics.reader import MetricsReader
from coarse.metrics.values import Metrics
from coarse.metrics.writer import MetricsWriter
from coarse.schema import TensorSpec

if TYPE_CHECKING:
    from coarse.arrays import AnyArray


class SingleWorkerClient:
    """The interface of Client; every result is the worker's own contribution."""

    def __init__(self) -> None:
        self._stored: dict[str, StoredValue] = {}
        self._metrics_reader = _own_metrics()
        self.metrics = MetricsWriter(self._metrics_reader.worker(0))
        """This worker's metrics."""
        self._steps = _Steps(self.metrics)

    def read_metrics(self) -> Metrics:
        """The metrics of this worker."""
        return self._metrics_reader.read()

    def register(self, name: str, specs: Sequence[TensorSpec]) -> SingleWorkerTensorGroup:
        """Allocates memory for the tensors."""
        group = SingleWorkerTensorGroup(name, specs, self._steps.pushed)
        self._steps.registered(group)
        return group

    def all_reduce(
        self, address: int, num_elements: int, dtype: str, op: str, *, present: bool = True
    ) -> None:
        """Leaves the buffer as it is: the sum, mean and maximum of one worker are its own values."""

    def store(self, key: str, *pieces: memoryview[Any]) -> int:
        """Keeps a copy of the pieces as one value; returns its version."""
        value = memoryview(b"".join(pieces))
        self._stored[key] = StoredValue(version=self.load(key).version + 1, value=value)
        return self._stored[key].version

    def load(self, key: str) -> StoredValue:
        """The newest value of `key`; version 0 and no bytes if none was stored."""
        return self._stored.get(key, StoredValue(version=0, value=memoryview(b"")))

    def snapshot_stored(self) -> StorageSnapshot:
        """All current values; store() replaces values and never changes them."""
        values = dict(self._stored)
        nothing = StoredValue(version=0, value=memoryview(b""))
        return StorageSnapshot(lambda key: values.get(key, nothing), values.clear)

    def release_buffers(self) -> None:
        """Does nothing: no buffers are kept."""

    def close(self, *, is_finished: bool = True, leaves_early: bool = False) -> None:
        """Does nothing."""


def _ignore(group: SingleWorkerTensorGroup, index: int) -> None:
    """Times no steps."""


class _Steps:
    """Times steps as native clients do: from a push of the largest group's first tensor to its next push."""

    def __init__(self, metrics: MetricsWriter) -> None:
        self._metrics = metrics
        self._largest: Callable[[], SingleWorkerTensorGroup | None] = lambda: None
        self._largest_bytes = 0
        self._first: int | None = None
        self._began_s = 0.0

    def registered(self, group: SingleWorkerTensorGroup) -> None:
        """Notes a new group."""
        num_bytes = sum(spec.nbytes for spec in group.specs)
        if self._largest() is None or num_bytes > self._largest_bytes:
            self._largest, self._largest_bytes, self._first = weakref.ref(group), num_bytes, None

    def pushed(self, group: SingleWorkerTensorGroup, index: int) -> None:
        """Notes the push of a tensor."""
        if group is not self._largest() or self._first not in (None, index):
            return
        now_s = time.monotonic()
        if self._first is not None:
            self._metrics.observe("coarse_step_seconds", now_s - self._began_s)
        self._first, self._began_s = index, now_s


class SingleWorkerTensorGroup:
    """The interface of TensorGroup, for one worker."""

    def __init__(
        self,
        name: str,
        specs: Sequence[TensorSpec],
        on_push: Callable[[SingleWorkerTensorGroup, int], None] = _ignore,
    ) -> None:
        self.id = 0
        self._on_push = on_push
        self.name = name
        self.specs = tuple(specs)
        self._buffers: list[memoryview[Any]] | None = [memoryview(bytearray(spec.nbytes)) for spec in specs]
        self._contributors = [0] * len(self.specs)

    def buffer(self, index: int) -> memoryview[Any]:
        """The writable bytes of a tensor."""
        return self._open()[index]

    def push(
        self, index: int, *, present: bool = True, joined: bool = False, source: int | AnyArray = 0
    ) -> None:
        """Accepts the contribution, which is also the result."""
        buffer = self._open()[index]
        if not isinstance(source, int):
            with self._address_of(index, source, writes=False) as address:
                self.push(index, present=present, joined=joined, source=address)
            return
        self._on_push(self, index)
        if source:
            ctypes.memmove(_address(buffer), source, len(buffer))
        self._contributors[index] = int(present and not joined)

    def flush(self) -> None:
        """Does nothing."""

    def pull(self, index: int, *, destination: int | AnyArray = 0) -> int:
        """Returns at once; copies the result if `destination` is not 0."""
        buffer = self._open()[index]
        if not isinstance(destination, int):
            with self._address_of(index, destination, writes=True) as address:
                return self.pull(index, destination=address)
        if destination:
            ctypes.memmove(destination, _address(buffer), len(buffer))
        return self._contributors[index]

    def pull_all(self) -> list[int]:
        """Returns at once."""
        self._open()
        return list(self._contributors)

    def close(self) -> None:
        """Frees the tensors. Idempotent."""
        self._buffers = None

    def _address_of(self, index: int, array: AnyArray, *, writes: bool) -> AbstractContextManager[int]:
        from coarse.arrays import tensor_address  # needs numpy

        return tensor_address(array, self.specs[index], self.name, writes=writes)

    def _open(self) -> list[memoryview[Any]]:
        if self._buffers is None:
            raise SessionClosedError(f"tensor group {self.name!r} is closed")
        return self._buffers


def _own_metrics() -> MetricsReader:
    fd = _native.create_sealed_memory("metrics", _native.metrics_bytes(0, 1))
    try:
        return MetricsReader.of_segment(fd, 0, (0,))
    finally:
        os.close(fd)


def _address(buffer: memoryview[Any]) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))

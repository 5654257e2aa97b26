"""Memory of stored values, and the transfers between it and workers (docs/design/storage.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from coarse.errors import OutOfDeviceMemoryError
from coarse.proxy.memory.device_memory import DeviceMemory
from coarse.wire.segments import Segment

if TYPE_CHECKING:
    from coarse.proxy.memory.cuda import CudaMemory

LEAST_GPU_VALUE_BYTES = 1 << 20
"""Smaller values lie in the host's memory: a GPU allocates whole pages of 2 MiB."""


class ValueMemory(Protocol):
    """The memory of one memory device for stored values. Used from one thread at a time."""

    def reserve(self, label: str, num_bytes: int) -> Segment:
        """Memory into which a worker writes a value.

        Raises:
            OutOfDeviceMemoryError: If it is not available; then nothing was allocated.
        """

    def commit(self, label: str, written: Segment) -> Segment:
        """Moves a value that a worker has written to its final place; takes ownership of `written`.

        Raises:
            OutOfDeviceMemoryError: If the memory is full; then the caller keeps `written`.
        """

    def open(self, value: Segment) -> Segment:
        """A value for a worker to read, in a new segment, which must be closed separately.

        Raises:
            OutOfDeviceMemoryError: If it needs a copy and the memory is full.
        """


class MappedValues:
    """Values in memory that workers map: they write and read them in place."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def reserve(self, label: str, num_bytes: int) -> Segment:
        return self._memory.allocate(label, num_bytes)

    def commit(self, label: str, written: Segment) -> Segment:
        del label
        return written

    def open(self, value: Segment) -> Segment:
        return value.to_read()


class GpuValues:
    """Values in GPU memory. Workers write and read copies in host memory: they need not see the GPU."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory

    def reserve(self, label: str, num_bytes: int) -> Segment:
        if num_bytes > self._memory.available_bytes():
            raise OutOfDeviceMemoryError(self._memory.shortage(label, num_bytes))
        return self._memory.allocate_host(label, num_bytes)

    def commit(self, label: str, written: Segment) -> Segment:
        if written.num_bytes < LEAST_GPU_VALUE_BYTES:
            return written
        value = self._memory.allocate(label, written.num_bytes)
        try:
            self._memory.upload(written, value)
        except BaseException:
            value.close()
            raise
        written.close()
        return value

    def open(self, value: Segment) -> Segment:
        if not value.gpu:
            return value.to_read()
        copy = self._memory.allocate_host("copy of a stored tensor", value.num_bytes)
        try:
            self._memory.download(value, copy)
            return copy.to_read()
        finally:
            copy.close()


def value_memory(memory: DeviceMemory) -> ValueMemory:
    """The memory in which a memory device keeps stored values."""
    return MappedValues(memory) if memory.is_mappable else GpuValues(cast("CudaMemory", memory))

"""The interface of all kinds of device memory, and functions that open one by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coarse.kernels import _native
from coarse.machine.memory_name import MemoryName
from coarse.wire.segments import Segment


class DeviceMemory(Protocol):
    """The memory of one memory device. Used from one thread at a time."""

    kind: str
    is_mappable: bool
    """Whether processors read and write it; otherwise it is GPU memory."""
    num_places: int
    """Number of memories over which its pages are interleaved."""
    takes_pages_later: bool
    """Whether allocate_sparse() can replace allocate(), and workers reserve pages on demand."""
    message_bytes: int
    """Largest message between neighbours of a ring, in bytes."""

    @property
    def name(self) -> str:
        """A readable name: host memory, NUMA node 2, /dev/dax0.0, cuda:1."""

    def allocate(self, label: str, num_bytes: int) -> Segment:
        """Allocates `num_bytes` of zeroed memory, for tensors.

        Raises:
            OutOfDeviceMemoryError: If it is not available; then nothing was allocated.
        """

    def allocate_host(self, label: str, num_bytes: int) -> Segment:
        """Allocates sealed memory that every processor reaches, for control words and copies that workers read.

        Raises:
            OutOfDeviceMemoryError: If it is not available; then nothing was allocated.
        """

    def allocate_sparse(self, label: str, num_bytes: int) -> Segment:
        """Sealed memory whose pages are allocated and freed one by one later; allocates none now.

        Raises:
            OutOfDeviceMemoryError: If such memory does not exist.
        """

    def available_bytes(self) -> int:
        """Bytes that allocate() can currently still allocate."""

    def cores(self) -> tuple[int, ...]:
        """The processors nearest to it; () if none is nearer than others."""

    def tensor_memory(self) -> _native.TensorMemory | None:
        """The interface by which sync cores access tensors; None if they access them directly.

        Raises:
            CoarseError: If it is not available.
        """

    def snapshot_pool(self, plan: _native.GroupPlan) -> _native.SnapshotPool | None:
        """The pool for old versions of a group's parameters and states; None if they use sparse memory.

        Raises:
            _native.CudaError: If it cannot be allocated.
        """

    def close(self) -> None:
        """Frees the memory, except for segments that are still open or mapped in any process. Idempotent."""


@dataclass(frozen=True, slots=True)
class DeviceMemories:
    """The memories from which a memory device allocates.

    Args:
        own: Memory for slots and for values that workers store.
        common: Memory for data that a node holds once: parameters and states of optimizers. It spans the memories of
            all the node's memory devices if these are NUMA nodes, or GPUs that reach each other, and replicas are
            off; otherwise it is `own`.
    """

    own: DeviceMemory
    common: DeviceMemory

    def close(self) -> None:
        """Closes both. Idempotent."""
        self.common.close()
        self.own.close()


def open_memories(names: Sequence[str], device: int, *, replicas: int = 0) -> DeviceMemories:
    """The memories of one memory device.

    Args:
        names: Names of the memories of the node's devices, as in MemoryName.
        device: Number of this device.
        replicas: Extra copies of each device's contents. Data that must survive the loss of a device cannot be spread
            over all devices.

    Raises:
        ValueError, DeviceMemoryBusyError: As for open_memory().
    """
    own = open_memory(names[device])
    memories = {MemoryName.parse(name): None for name in names}  # in the order of devices
    if replicas or len(memories) < 2 or any(memory.kind != own.kind for memory in memories):
        return DeviceMemories(own=own, common=own)
    return DeviceMemories(own=own, common=_common_memory(own, [memory.place for memory in memories]))


def _common_memory(own: DeviceMemory, places: Sequence[str]) -> DeviceMemory:
    """A memory that spans several places, all of the kind of `own`; `own` itself if that is impossible."""
    if own.kind == "numa":
        from coarse.proxy.memory.numa import NumaMemory

        return NumaMemory(*sorted(map(int, places)))
    if own.kind == "cuda":
        from coarse.proxy.memory.cuda import CudaMemory
        from coarse.proxy.memory.spread_cuda import SpreadCudaMemory, reachable_from

        assert isinstance(own, CudaMemory)
        others = [int(place) for place in places if int(place) != own.device]
        if reachable := reachable_from(own.device, others):
            return SpreadCudaMemory(own, reachable)
    return own


def open_memory(name: str) -> DeviceMemory:
    """Opens the memory of a memory device, which then owns it.

    Args:
        name: As in MemoryName.

    Raises:
        ValueError: If this machine has no such memory; lists the existing ones.
        DeviceMemoryBusyError: If another process uses it exclusively.
    """
    memory = MemoryName.parse(name)
    if memory.kind == "numa":
        from coarse.proxy.memory.numa import NumaMemory

        return NumaMemory(int(memory.place))
    if memory.kind == "dax":
        from coarse.proxy.memory.dax import DaxMemory

        return DaxMemory(memory.place)
    if memory.kind == "cuda":
        from coarse.proxy.memory.cuda import CudaMemory

        return CudaMemory(int(memory.place))
    from coarse.proxy.memory.host import HostMemory

    return HostMemory()


def try_memory(name: str) -> None:
    """Allocates a little of a memory and frees it, to find errors before a device starts.

    Raises:
        ValueError, CoarseError: As for open_memory() and allocate().
    """
    if MemoryName.parse(name).kind == "cuda":
        from coarse.proxy.memory.cuda import check_cuda

        return check_cuda(int(MemoryName.parse(name).place))  # no context: the memory device creates one
    memory = open_memory(name)
    try:
        memory.allocate("a trial", 1).close()
    finally:
        memory.close()


def require_compiler(name: str) -> None:
    """Checks that a compiler for the kernels of a memory's GPU exists; compiles nothing and creates no CUDA context.

    For processes without a framework: the loaded library versions may conflict with a framework.

    Raises:
        CoarseError: If no compiler exists; names the package to install.
    """
    memory = MemoryName.parse(name)
    if memory.kind == "cuda":
        from coarse.kernels.cuda_kernels import find_compiler

        find_compiler(int(memory.place))


def available_bytes(name: str) -> int:
    """Available bytes of a memory, for a process that does not own it.

    Raises:
        ValueError: If this machine has no such memory.
    """
    memory = MemoryName.parse(name)
    if memory.kind == "dax":
        from coarse.proxy.memory.dax import dax_geometry

        return dax_geometry(memory.place).num_bytes
    return open_memory(name).available_bytes()

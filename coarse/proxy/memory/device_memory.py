"""What all kinds of device memory have in common, and how one is opened by its name."""

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
    """Whether processors read and write it; else it is that of a GPU."""
    num_places: int
    """On how many memories its pages lie by turns."""
    takes_pages_later: bool
    """Whether allocate_sparse() can stand in for allocate(), and a worker reserves pages when they are needed."""
    message_bytes: int
    """Of a message between neighbours of a ring, at most."""

    @property
    def name(self) -> str:
        """As people know it: host memory, NUMA node 2, /dev/dax0.0, cuda:1."""

    def allocate(self, label: str, num_bytes: int) -> Segment:
        """Takes `num_bytes` of zeroed memory, for tensors.

        Raises:
            OutOfDeviceMemoryError: If it is not there; nothing was taken.
        """

    def allocate_host(self, label: str, num_bytes: int) -> Segment:
        """The same as sealed memory that every processor reaches, for control words and copies that workers read.

        Raises:
            OutOfDeviceMemoryError: If it is not there; nothing was taken.
        """

    def allocate_sparse(self, label: str, num_bytes: int) -> Segment:
        """Sealed memory whose pages are taken, and given back, one by one later; nothing is taken now.

        Raises:
            OutOfDeviceMemoryError: If there is no such memory.
        """

    def available_bytes(self) -> int:
        """How much allocate() can still give, at this moment."""

    def cores(self) -> tuple[int, ...]:
        """The processors nearest to it; () where none is nearer than others."""

    def tensor_memory(self) -> _native.TensorMemory | None:
        """What sync cores reach tensors by; None where they do so themselves.

        Raises:
            CoarseError: If it cannot be had.
        """

    def snapshot_pool(self, plan: _native.GroupPlan) -> _native.SnapshotPool | None:
        """Where old versions of a group's parameters and states go; None where that is sparse memory.

        Raises:
            _native.CudaError: If it cannot be had.
        """

    def close(self) -> None:
        """Gives the memory up, but for segments that are still open or mapped somewhere. Idempotent."""


@dataclass(frozen=True, slots=True)
class DeviceMemories:
    """What a memory device allocates from.

    Args:
        own: Where slots lie, and values that workers store.
        common: Where that lies which a node has once, parameters and states of optimizers: in the memory of all its
            memory devices, where these are NUMA nodes, or GPUs that reach each other, and nothing has replicas; else
            it is `own`.
    """

    own: DeviceMemory
    common: DeviceMemory

    def close(self) -> None:
        """Gives both up. Idempotent."""
        self.common.close()
        self.own.close()


def open_memories(names: Sequence[str], device: int, *, replicas: int = 0) -> DeviceMemories:
    """The memories of one memory device.

    Args:
        names: Of the memory of each device of the node, as in MemoryName.
        device: Which of them it is.
        replicas: How many others have what each device has: what is to outlive one of them may not lie in parts with
            all.

    Raises:
        ValueError, DeviceMemoryBusyError: As open_memory().
    """
    own = open_memory(names[device])
    memories = {MemoryName.parse(name): None for name in names}  # in the order of devices
    if replicas or len(memories) < 2 or any(memory.kind != own.kind for memory in memories):
        return DeviceMemories(own=own, common=own)
    return DeviceMemories(own=own, common=_common_memory(own, [memory.place for memory in memories]))


def _common_memory(own: DeviceMemory, places: Sequence[str]) -> DeviceMemory:
    """What has memory of several places, all of the kind of `own`; `own` itself if nothing can."""
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
    """The memory of a memory device, to be its own from now on.

    Args:
        name: As in MemoryName.

    Raises:
        ValueError: If there is no such memory here; says what there is.
        DeviceMemoryBusyError: If somebody else has it for himself.
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
    """Takes a little of a memory and gives it back, so that what is wrong is known before a device is started.

    Raises:
        ValueError, CoarseError: As open_memory() and allocate() do.
    """
    if MemoryName.parse(name).kind == "cuda":
        from coarse.proxy.memory.cuda import check_cuda

        return check_cuda(int(MemoryName.parse(name).place))  # no context: the memory device has one
    memory = open_memory(name)
    try:
        memory.allocate("a trial", 1).close()
    finally:
        memory.close()


def require_compiler(name: str) -> None:
    """Looks for what compiles the kernels of a memory's GPU; compiles nothing, and makes no CUDA context.

    Loads libraries, of versions that a framework in this process may not want: for processes without one.

    Raises:
        CoarseError: If there is none; says what to install.
    """
    memory = MemoryName.parse(name)
    if memory.kind == "cuda":
        from coarse.kernels.cuda_kernels import find_compiler

        find_compiler(int(memory.place))


def available_bytes(name: str) -> int:
    """How much a memory can give, for whoever does not own it.

    Raises:
        ValueError: If there is no such memory here.
    """
    memory = MemoryName.parse(name)
    if memory.kind == "dax":
        from coarse.proxy.memory.dax import dax_geometry

        return dax_geometry(memory.place).num_bytes
    return open_memory(name).available_bytes()

"""The bytes of tensors as this worker sees them, in the memory of the host or of a GPU."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any, TypeAlias

from coarse.errors import GpuUnavailableError
from coarse.kernels import _native
from coarse.wire.segments import Segment

logger = logging.getLogger(__name__)

_DLPACK_CUDA = 2


class GpuBytes:
    """A piece of GPU memory, mapped for one GPU as long as this object or a slice of it lives.

    Args:
        memory: The memory that contains the piece.
        start, num_bytes: Offset and length of the piece.
    """

    def __init__(self, memory: _native.CudaMemory, start: int, num_bytes: int) -> None:
        self._memory = memory
        self._start = start
        self.nbytes = num_bytes

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, piece: slice) -> GpuBytes:
        start, stop, step = piece.indices(self.nbytes)
        if step != 1:
            raise ValueError(f"a slice of the memory of a GPU has step 1, not {step}")
        return GpuBytes(self._memory, self._start + start, max(0, stop - start))

    @property
    def address(self) -> int:
        """Address of the first byte, for work on the GPU."""
        return self._memory.address + self._start

    def __dlpack__(self, **_: Any) -> object:
        """Lets PyTorch and CuPy make arrays from it without a copy, on the GPU for which it is mapped.

        Otherwise they would use the GPU where the memory lies, and create a context on that GPU.
        """
        return self._memory.dlpack_capsule(self._start, self.nbytes)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self._memory.device


TensorBytes: TypeAlias = memoryview | GpuBytes
"""Bytes that this worker, or its GPU, reads and writes."""


def map_tensors(segment: Segment, gpu: str = "") -> tuple[TensorBytes, str]:
    """Maps memory for all its users in this process, as long as any of them exists.

    Args:
        segment: The memory, of the host or of a GPU.
        gpu: UUID of the GPU that holds this worker's model; "" for the host.

    Returns:
        The mapped memory, and the UUID of the GPU for which it is mapped: `gpu`, or if that cannot reach the memory,
        the GPU where the memory begins; "" for the host.

    Raises:
        GpuUnavailableError: If `gpu` cannot reach the memory, and this process does not see the GPU where it begins.
        _native.CudaError: If CUDA cannot map it.
    """
    if not segment.gpus:
        return segment.map(), ""
    reached = reach(segment, gpu) if gpu else None
    if reached is not None:
        return GpuBytes(reached, 0, segment.num_bytes), gpu
    return gpu_bytes(segment), segment.gpu


def gpu_bytes(segment: Segment) -> GpuBytes:
    """A segment of GPU memory, mapped for the GPU where it begins.

    Raises:
        GpuUnavailableError, _native.CudaError: As for import_memory().
    """
    return GpuBytes(import_memory(segment), 0, segment.num_bytes)


def host_view(num_bytes: int) -> _native.Mapping:
    """Memory of the host in which a worker sees slots that lie on a GPU."""
    fd = _native.create_sealed_memory("coarse-view of slots on a GPU", num_bytes)
    try:
        return _native.Mapping(fd, num_bytes)
    finally:
        os.close(fd)


def import_memory(segment: Segment, gpu: str = "", *, is_own: bool = False) -> _native.CudaMemory:
    """Maps a segment of GPU memory for one GPU.

    Args:
        segment: The memory.
        gpu: UUID of the GPU for which to map it; "" for the GPU where the memory begins.
        is_own: Whether nothing else uses the memory now. Then a trial copy can test whether the GPU reaches it, if
            this process does not see the memory's GPU.

    Raises:
        GpuUnavailableError: If this process does not see the GPU for which to map it.
        _native.CudaError: If CUDA cannot map it, or the GPU cannot reach it.
    """
    # Kernels that use the memory may still run when its last tensor is dropped.
    return _native.CudaMemory.import_region(
        gpu_context(gpu or segment.gpu), segment.region, settles=True, is_own=is_own
    )


def reach(segment: Segment, gpu: str, *, is_own: bool = False) -> _native.CudaMemory | None:
    """Maps GPU memory for a GPU; logs it and returns None if that GPU cannot reach it.

    Args:
        segment, gpu, is_own: As for import_memory().

    Raises:
        GpuUnavailableError: If it cannot, and this process does not see the GPU where the memory begins.
    """
    try:
        return import_memory(segment, gpu, is_own=is_own)
    except _native.CudaError as error:
        try:
            _ordinal(segment.gpu)
        except GpuUnavailableError as unseen:
            raise GpuUnavailableError(f"{unseen}, for tensors to go through the host: {error}") from error
        _warn_of_distance(gpu, tuple(segment.gpus), str(error))
        return None


def try_to_reach(segment: Segment, gpu: str, *, is_own: bool = False) -> _native.CudaMemory | None:
    """Like reach(), but neither logs nor raises GpuUnavailableError for the memory's own GPU."""
    try:
        return import_memory(segment, gpu, is_own=is_own)
    except _native.CudaError:
        return None


@cache  # once for all groups of tensors
def _warn_of_distance(gpu: str, owners: tuple[str, ...], reason: str) -> None:
    logger.warning(
        "%s cannot reach the memory of %s, so tensors go through the host (coarse profile --gpus measures that): %s",
        _name_of(gpu),
        " and ".join(map(_name_of, owners)),
        reason,
    )


def _name_of(gpu: str) -> str:
    try:
        return f"cuda:{_ordinal(gpu)}"
    except GpuUnavailableError:
        return gpu


def gpu_uuid(device: int) -> str:
    """UUID of CUDA device `device` in this process; "" if it does not exist."""
    if _native.cuda_unavailable_reason() or device >= _native.cuda_num_devices():
        return ""
    return _native.cuda_device_uuid(device)


@cache  # a context uses several hundred MB of GPU memory and lasts as long as the process anyway
def gpu_context(gpu: str) -> _native.CudaContext:
    """The CUDA context of a GPU, by UUID, which PyTorch and CuPy also use.

    Raises:
        GpuUnavailableError: If this process does not see the GPU.
    """
    return _native.CudaContext(_ordinal(gpu))


def _ordinal(gpu: str) -> int:
    if reason := _native.cuda_unavailable_reason():
        raise GpuUnavailableError(f"memory devices have slots on a GPU that this worker cannot use: {reason}")
    for device in range(_native.cuda_num_devices()):
        if _native.cuda_device_uuid(device) == gpu:
            return device
    raise GpuUnavailableError(
        f"memory devices have slots on {gpu}, which this worker does not see; let CUDA_VISIBLE_DEVICES have it"
    )

"""The bytes of tensors where this worker sees them: in the host's memory, or in that of a GPU."""

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
    """A piece of memory of GPUs as one of them works on it, mapped as long as this or a slice of it lives.

    Args:
        memory: What it is a piece of.
        start, num_bytes: Which piece.
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
        """Of the first byte, for work on the GPU."""
        return self._memory.address + self._start

    def __dlpack__(self, **_: Any) -> object:
        """By which PyTorch and CuPy make arrays of it without a copy: of the GPU that works on it.

        Theirs would otherwise be of the GPU where it lies, on which they would make a context to touch it.
        """
        return self._memory.dlpack_capsule(self._start, self.nbytes)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self._memory.device


TensorBytes: TypeAlias = memoryview | GpuBytes
"""Bytes that this worker, or its GPU, reads and writes."""


def map_tensors(segment: Segment, gpu: str = "") -> tuple[TensorBytes, str]:
    """Maps memory for all who use it in this process, until they do not any more.

    Args:
        segment: The memory, of the host or of a GPU.
        gpu: Where this worker's model is, by UUID; "" for the host.

    Returns:
        The memory, where it lies; and the GPU that works on it, by UUID: that one, or where it cannot reach the
        memory the one where this begins; "" for the host.

    Raises:
        GpuUnavailableError: If that GPU cannot reach it, and this process does not see the one where it begins.
        _native.CudaError: If CUDA cannot map it.
    """
    if not segment.gpus:
        return segment.map(), ""
    reached = reach(segment, gpu) if gpu else None
    if reached is not None:
        return GpuBytes(reached, 0, segment.num_bytes), gpu
    return gpu_bytes(segment), segment.gpu


def gpu_bytes(segment: Segment) -> GpuBytes:
    """A segment that is memory of GPUs, for the one where it begins to work on.

    Raises:
        GpuUnavailableError, _native.CudaError: As import_memory().
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
    """Maps a segment that is memory of GPUs, for one of them to work on.

    Args:
        segment: The memory.
        gpu: Another GPU that is to work on it, by UUID; "" for the one where it begins.
        is_own: Nobody else uses it now, so that it can be tried whether copies arrive there, where this process does
            not see whose memory it is.

    Raises:
        GpuUnavailableError: If this process does not see the GPU that is to work on it.
        _native.CudaError: If CUDA cannot map it, or the GPU cannot reach it.
    """
    # Whoever drops the last tensor over it may have kernels under way that use it.
    return _native.CudaMemory.import_region(
        gpu_context(gpu or segment.gpu), segment.region, settles=True, is_own=is_own
    )


def reach(segment: Segment, gpu: str, *, is_own: bool = False) -> _native.CudaMemory | None:
    """Maps memory of GPUs for any one to work on; None if that cannot reach it, which is logged.

    Args:
        segment, gpu, is_own: As for import_memory().

    Raises:
        GpuUnavailableError: If it cannot, and this process does not see the GPU where it begins either.
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
    """As reach(), of whom nobody needs to know it."""
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
    """The GPU that CUDA counts as `device` in this process; "" if there is none."""
    if _native.cuda_unavailable_reason() or device >= _native.cuda_num_devices():
        return ""
    return _native.cuda_device_uuid(device)


@cache  # a context is several hundred MB of the GPU's memory, and lasts as long as the process in any case
def gpu_context(gpu: str) -> _native.CudaContext:
    """That of a GPU, by UUID, which PyTorch and CuPy use too.

    Raises:
        GpuUnavailableError: If this process does not see it.
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

"""The bytes of tensors where this worker sees them: in the host's memory, or in that of a GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

from coarse.errors import CoarseError
from coarse.kernels import _native
from coarse.proxy.memory import Segment

logger = logging.getLogger(__name__)


class GpuBytes:
    """A piece of the memory of GPUs, mapped as long as this or a slice of it lives.

    Args:
        memory: What it is a piece of.
        owners: Ordinals of the GPUs in whose memory that lies, in this process, each with where its part ends.
        start, num_bytes: Which piece.
    """

    def __init__(
        self, memory: _native.CudaMemory, owners: Sequence[tuple[int, int]], start: int, num_bytes: int
    ) -> None:
        self._memory = memory
        self._owners = owners
        self._start = start
        self.nbytes = num_bytes

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, piece: slice) -> GpuBytes:
        start, stop, step = piece.indices(self.nbytes)
        if step != 1:
            raise ValueError(f"a slice of the memory of a GPU has step 1, not {step}")
        return GpuBytes(self._memory, self._owners, self._start + start, max(0, stop - start))

    @property
    def device(self) -> int:
        """The GPU where it begins, which CUDA says it is of, and reaches the rest too."""
        return next((device for device, end in self._owners if self._start < end), self._owners[-1][0])

    @property
    def address(self) -> int:
        """Of the first byte, for work on the GPU."""
        return self._memory.address + self._start

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """By which PyTorch and CuPy make arrays of it without a copy."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


TensorBytes: TypeAlias = memoryview | GpuBytes
"""Bytes that this worker, or its GPU, reads and writes."""


def map_tensors(segment: Segment, gpu: str = "") -> tuple[TensorBytes, bool]:
    """Maps memory for all who use it in this process, until they do not any more.

    Args:
        segment: The memory, of the host or of a GPU.
        gpu: Where this worker's model is, by UUID; "" for the host.

    Returns:
        The memory, where it lies; and whether that GPU can copy to it and from it.

    Raises:
        CoarseError: If it is memory of a GPU that this process does not see.
        _native.CudaError: If CUDA cannot map it.
    """
    if not segment.gpus:
        return segment.map(), bool(gpu)
    if gpu in ("", *segment.gpus):
        return gpu_bytes(segment), bool(gpu)
    try:
        return gpu_bytes(segment, gpu), True
    except _native.CudaError as error:
        _warn_of_distance(segment, gpu, error)
        return gpu_bytes(segment), False


def gpu_bytes(segment: Segment, other_gpu: str = "") -> GpuBytes:
    """A segment that is memory of GPUs, for these to work on.

    Args:
        segment: The memory.
        other_gpu: Another GPU that is to work on it too, by UUID.

    Raises:
        CoarseError: If this process does not see a GPU.
        _native.CudaError: If CUDA cannot map it, or a GPU cannot reach it.
    """
    contexts = [_context(gpu) for gpu in segment.gpus]
    first, *others = dict.fromkeys([*contexts, *([_context(other_gpu)] if other_gpu else ())])
    memory = _import(segment, first, others)
    ends = accumulate(extent.num_bytes for _, extent in segment.pieces if extent is not None)
    owners = [(context.device, end) for context, end in zip(contexts, ends, strict=True)]
    return GpuBytes(memory, owners, 0, segment.num_bytes)


def host_view(num_bytes: int) -> _native.Mapping:
    """Memory of the host in which a worker sees slots that lie on a GPU."""
    fd = _native.create_sealed_memory("coarse-view of slots on a GPU", num_bytes)
    try:
        return _native.Mapping(fd, num_bytes)
    finally:
        os.close(fd)


def import_memory(segment: Segment, gpu: str = "") -> _native.CudaMemory:
    """Maps a segment that is memory of one GPU, for that GPU to work on.

    Args:
        segment: The memory.
        gpu: Another GPU that is to work on it instead, by UUID. Not for PyTorch, which would take it for its own.

    Raises:
        CoarseError: If this process does not see the GPU.
        _native.CudaError: If CUDA cannot map it, or the other GPU cannot reach it.
    """
    return _import(segment, _context(gpu or segment.gpu), [])


def reach(segment: Segment, gpu: str) -> _native.CudaMemory | None:
    """Maps memory of a GPU for another one to work on; None if that cannot reach it, which is logged."""
    try:
        return import_memory(segment, gpu)
    except _native.CudaError as error:
        _warn_of_distance(segment, gpu, error)
        return None


def _import(
    segment: Segment, context: _native.CudaContext, others: Sequence[_native.CudaContext]
) -> _native.CudaMemory:
    # Whoever drops the last tensor over it may have kernels under way that use it.
    return _native.CudaMemory.import_region(context, segment.region, others=others, settles=True)


def _warn_of_distance(segment: Segment, gpu: str, error: _native.CudaError) -> None:
    logger.warning(
        "%s cannot reach the memory of %s, so tensors go through the host: %s",
        gpu,
        " and ".join(segment.gpus),
        error,
    )


def gpu_uuid(device: int) -> str:
    """The GPU that CUDA counts as `device` in this process; "" if there is none."""
    if _native.cuda_unavailable_reason() or device >= _native.cuda_num_devices():
        return ""
    return _native.cuda_device_uuid(device)


@cache  # a context is several hundred MB of the GPU's memory, and lasts as long as the process in any case
def _context(gpu: str) -> _native.CudaContext:
    if reason := _native.cuda_unavailable_reason():
        raise CoarseError(f"memory devices have slots on a GPU that this worker cannot use: {reason}")
    for device in range(_native.cuda_num_devices()):
        if _native.cuda_device_uuid(device) == gpu:
            return _native.CudaContext(device)
    raise CoarseError(
        f"memory devices have slots on {gpu}, which this worker does not see; let CUDA_VISIBLE_DEVICES have it"
    )

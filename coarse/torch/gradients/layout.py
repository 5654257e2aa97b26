"""Tensors over registered memory, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from coarse.client.memory.tensor_bytes import GpuBytes, TensorBytes, gpu_uuid

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.complex64: "float32",
    torch.complex128: "float64",
}
"""COARSE's names of the gradient dtypes that memory devices can average; for complex types, those of their parts."""


def slot_tensor(memory: TensorBytes, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor over `memory` with the shape and, if they leave no holes, strides of `like`.

    It is on the device of the memory. Its dtype is `dtype`, or that of `like` if `dtype` is None.

    It is not a view of another tensor, so it can be assigned to `.grad` without autograd's rules for views. It keeps
    the memory mapped as long as it exists.
    """
    dtype = dtype or like.dtype
    flat = _flat_tensor(memory)
    strides = like.stride() if is_dense(like.shape, like.stride()) else contiguous_strides(like.shape)
    empty = torch.empty(0, dtype=dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), 0, like.shape, strides)


class SlotViews:
    """Tensors over slots for `.grad`, separate from the tensors that write the slots.

    If the memory of one was replaced (`.grad.data = ...`, as Module.half() and float() do, or share_memory_()), it
    is created again.

    Args:
        slots: Slots of all gradients.
    """

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self._slots = slots
        self._addresses = [slot.data_ptr() for slot in slots]
        self.last = [same_memory(slot) for slot in slots]
        """The tensors as returned last, whose memory may have been replaced."""

    def __getitem__(self, index: int) -> torch.Tensor:
        """The tensor over a slot."""
        view = self.last[index]
        if view.data_ptr() != self._addresses[index] or view.dtype is not self._slots[index].dtype:
            view = self.last[index] = same_memory(self._slots[index])
        return view

    def hold(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient is the tensor over a slot and still uses the slot's memory."""
        return gradient is self.last[index] and gradient.data_ptr() == self._addresses[index]


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns another tensor over the same memory that is not a view, so autograd's rules for views do not apply.

    It also has a separate storage. share_memory_(), and torch.multiprocessing when it sends a tensor to another
    process, replace the memory of a storage and thus move every tensor that shares it.
    """
    # Strides are set explicitly, because DLPack changes them in older versions of torch.
    storage = from_dlpack(to_dlpack(tensor.detach())).untyped_storage()
    alike = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alike.set_(storage, 0, tensor.shape, tensor.stride())


def forget_values(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Replaces the memory of parameters in host memory by uninitialised memory whose pages are not allocated yet."""
    for parameter in parameters:
        if parameter.is_cpu:
            parameter.data = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu"
            )


def _flat_tensor(memory: TensorBytes) -> torch.Tensor:
    """The bytes of `memory`, in place."""
    if isinstance(memory, GpuBytes):
        return torch.from_dlpack(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


def copy_all(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies tensor by tensor, in one call of torch.

    Copies between two GPUs go through the host. If the GPUs cannot access each other, torch uses a copy that needs
    memory from cudaMalloc, which the memory of memory devices is not.
    """
    pairs = [(d.detach(), s.detach()) for d, s in zip(destinations, sources, strict=True)]
    near = [pair for pair in pairs if not _are_two_gpus(*pair)]
    if near:
        torch._foreach_copy_(*map(list, zip(*near, strict=True)))
    for destination, source in pairs:
        if _are_two_gpus(destination, source):
            destination.copy_(source.cpu())


def _are_two_gpus(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not one.is_cpu and not other.is_cpu and one.device != other.device


def common_gpu(tensors: Sequence[torch.Tensor]) -> str:
    """CUDA's UUID of the GPU that holds all tensors; "" if no single GPU does."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or torch.version.cuda is None:
        return ""
    device = devices.pop()
    return gpu_uuid(device.index) if device.type == "cuda" else ""


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of this layout fill their memory without overlaps and holes, in any order."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= length
    return True


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor of this shape."""
    strides: list[int] = []
    stride = 1
    for length in reversed(shape):
        strides.append(stride)
        stride *= max(length, 1)
    return tuple(reversed(strides))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as a one-dimensional uint8 tensor over the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def num_bytes(tensor: torch.Tensor) -> int:
    """Size of the tensor's elements in bytes, independent of strides."""
    return int(tensor.numel() * tensor.element_size())


class Packing:
    """The layout of many tensors in one block of memory, each aligned to 16 bytes.

    Args:
        tensors: Tensors to lay out. Only shapes and dtypes matter.
    """

    _ALIGNMENT = 16

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._layout: list[tuple[int, int, Any, Any]] = []
        offset = 0
        for tensor in tensors:
            length = num_bytes(tensor)
            self._layout.append((offset, length, tensor.dtype, tensor.shape))
            offset += -(-length // self._ALIGNMENT) * self._ALIGNMENT
        self.num_bytes = offset

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether `tensors` have this layout."""
        return len(tensors) == len(self._layout) and all(
            tensor.dtype == dtype and tensor.shape == shape
            for tensor, (_, _, dtype, shape) in zip(tensors, self._layout, strict=True)
        )

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The tensors over `memory`, a uint8 tensor of at least `num_bytes` elements."""
        return [
            memory[offset : offset + length].view(dtype).view(shape)
            for offset, length, dtype, shape in self._layout
        ]

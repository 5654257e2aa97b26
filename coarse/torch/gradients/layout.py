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
"""The dtypes of gradients that memory devices can average, by COARSE's names; of complex numbers, of their parts."""


def slot_tensor(memory: TensorBytes, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor over `memory` with the shape and, if they leave no holes, strides of `like`.

    It is on the device where the memory is. Its dtype is `dtype`, or without one that of `like`.

    It is no view of another tensor, so that it can stand in `.grad` without autograd's rules for views; it
    keeps the memory mapped as long as it lives.
    """
    dtype = dtype or like.dtype
    flat = _flat_tensor(memory)
    strides = like.stride() if is_dense(like.shape, like.stride()) else contiguous_strides(like.shape)
    empty = torch.empty(0, dtype=dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), 0, like.shape, strides)


class SlotViews:
    """Tensors over slots that stand in `.grad`, apart from those by which slots are written.

    One that somebody has given other memory (`.grad.data = ...`, as Module.half() and float() do, or
    share_memory_()) is made anew.

    Args:
        slots: Of all gradients.
    """

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self._slots = slots
        self._addresses = [slot.data_ptr() for slot in slots]
        self._views = [same_memory(slot) for slot in slots]

    def __getitem__(self, index: int) -> torch.Tensor:
        """The one of a slot."""
        view = self._views[index]
        if view.data_ptr() != self._addresses[index] or view.dtype is not self._slots[index].dtype:
            view = self._views[index] = same_memory(self._slots[index])
        return view

    def hold(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient is the one of a slot, and still lies there."""
        return gradient is self._views[index] and gradient.data_ptr() == self._addresses[index]


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor over the memory of one, and no view of it: autograd's rules for views do not hold.

    Its storage is another one too: share_memory_(), and torch.multiprocessing where a tensor is sent to another
    process, give the storage other memory, and so move every tensor that has it.
    """
    # Strides are set by hand: those of older torch are others behind DLPack.
    storage = from_dlpack(to_dlpack(tensor.detach())).untyped_storage()
    alike = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alike.set_(storage, 0, tensor.shape, tensor.stride())


def forget_values(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Gives parameters in host memory new memory of the same layout, which holds nothing and takes no pages yet."""
    for parameter in parameters:
        if parameter.is_cpu:
            parameter.data = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu"
            )


def _flat_tensor(memory: TensorBytes) -> torch.Tensor:
    """The bytes of `memory`, where they are."""
    if isinstance(memory, GpuBytes):
        return torch.from_dlpack(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)


def copy_all(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies tensor by tensor, in one call of torch.

    Between two GPUs through the host: where they do not reach each other, torch copies as only memory of cudaMalloc
    allows, and that of memory devices is not.
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
    """The one GPU on which all tensors are, by UUID as CUDA has it; "" if there is none."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or torch.version.cuda is None:
        return ""
    device = devices.pop()
    return gpu_uuid(device.index) if device.type == "cuda" else ""


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of this layout fill their memory without overlaps and holes, in whatever order."""
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
    """Length of the tensor's elements in bytes, whatever its strides."""
    return int(tensor.numel() * tensor.element_size())


class Packing:
    """A run of memory that holds many tensors one after the other, each aligned to 16 bytes.

    Args:
        tensors: What to make room for. Only shapes and dtypes are looked at.
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
        """Whether `tensors` are what this was made for."""
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

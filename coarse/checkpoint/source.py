"""Sources of checkpoints: one consistent state, tensor by tensor, independent of the framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "U16": 2,
        "I16": 2,
        "F16": 2,
        "BF16": 2,
        "U32": 4,
        "I32": 4,
        "F32": 4,
        "U64": 8,
        "I64": 8,
        "F64": 8,
        "C64": 8,
    }
)
"""Bytes per element of each dtype, by the names of the safetensors format."""

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."

_READ_BYTES = 4 << 20
_LARGEST_TENSOR_BYTES = 1 << 62  # limit of frameworks and the system


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One tensor of a checkpoint.

    Args:
        name: Unique within the checkpoint: `model.<key>` or `optimizer.<state>.<parameter>`
            (docs/design/checkpoints.md).
        dtype: A key of DTYPE_BYTES.
        shape: Lengths of its dimensions; () for a scalar.

    Raises:
        ValueError: If the name is empty, the dtype is unknown, a length is negative, or the tensor is too large for
            any memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor of a checkpoint needs a name")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"tensor {self.name!r}: dtype {self.dtype!r} is not one that safetensors files can hold: "
                f"{', '.join(DTYPE_BYTES)}"
            )
        if any(length < 0 for length in self.shape):
            raise ValueError(f"tensor {self.name!r}: shape {self.shape} has a negative length")
        # Ignore lengths of 0: code that creates the tensor multiplies the other lengths too.
        if math.prod(length or 1 for length in self.shape) * DTYPE_BYTES[self.dtype] > _LARGEST_TENSOR_BYTES:
            raise ValueError(f"tensor {self.name!r}: no memory can hold the shape {str(self.shape)[:80]}")

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


Reserve = Callable[[int], memoryview]
"""Returns writable memory for the next so many bytes, in which a source may deliver its next piece."""


def any_memory(num_bytes: int) -> memoryview:
    """A Reserve for callers to whom every place is the same."""
    return memoryview(bytearray(num_bytes))


class CheckpointSource(Protocol):
    """The training state at one moment: parameters, buffers and optimizer state.

    The writer gets `tensors` once and then reads each of them once, from one thread: those with the largest elements
    first, as the file format requires, otherwise in this order. So a source may free a tensor when the next one is
    read. The writer calls close() at the end, whether it succeeded or not.
    """

    @property
    def step(self) -> int:
        """Number of updates that the state includes."""

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """All tensors, in the best order for reading."""

    def read(self, tensor: SavedTensor, reserve: Reserve = any_memory) -> Iterator[memoryview]:
        """The bytes of a tensor in row-major order, in pieces of any length, `tensor.nbytes` in total.

        Each piece is valid until the next one is requested, so that a source of bounded memory can serve a state of
        any size. No byte changes between the moment of the state and close(), even if training continues.

        A source that must copy anyway copies each piece to `reserve(its length)`, and yields that memory: the writer
        then writes it from there. Other sources ignore `reserve`.

        Raises:
            OSError, CoarseError: If the state can no longer be read; the writer then abandons the checkpoint.
        """

    def close(self) -> None:
        """Frees the state. Idempotent."""


class ArraySource:
    """A state in arrays of this process, which must not change until close().

    Args:
        step: Number of updates that it includes.
        arrays: The bytes of each tensor: C-contiguous arrays of any dtype, with `tensor.nbytes` bytes.

    Raises:
        ValueError: If an array has another length than its tensor, or is not contiguous.
    """

    def __init__(self, step: int, arrays: Mapping[SavedTensor, npt.NDArray[Any]]) -> None:
        self.step = step
        self.tensors: Sequence[SavedTensor] = tuple(arrays)
        self._bytes = {tensor: _bytes_of(array, tensor) for tensor, array in arrays.items()}

    def read(self, tensor: SavedTensor, reserve: Reserve = any_memory) -> Iterator[memoryview]:
        data = self._bytes[tensor]
        for start in range(0, len(data), _READ_BYTES):
            yield data[start : start + _READ_BYTES]

    def close(self) -> None:
        self._bytes = {}


def _bytes_of(array: npt.NDArray[Any], tensor: SavedTensor) -> memoryview:
    if array.nbytes != tensor.nbytes or not array.flags.c_contiguous:
        raise ValueError(
            f"tensor {tensor.name!r} needs {tensor.nbytes} contiguous bytes; its array has {array.nbytes} and "
            f"is {'' if array.flags.c_contiguous else 'not '}contiguous"
        )
    return array.reshape(-1).view(np.uint8).data

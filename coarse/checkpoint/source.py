"""What a checkpoint is written from: one consistent state, tensor by tensor, whatever framework it belongs to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
_LARGEST_TENSOR_BYTES = 1 << 62  # what frameworks and the system can count


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One tensor of a checkpoint.

    Args:
        name: Unique within the checkpoint: `model.<key>` or `optimizer.<state>.<parameter>`
            (docs/design/checkpoints.md).
        dtype: A key of DTYPE_BYTES.
        shape: Lengths of its dimensions; () for a scalar.

    Raises:
        ValueError: If the name is empty, the dtype is not known, a length is negative, or lengths are beyond what
            any memory could hold.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor of a checkpoint needs a name")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"tensor {self.name!r}: dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}, which safetensors "
                "files can hold"
            )
        if any(length < 0 for length in self.shape):
            raise ValueError(f"tensor {self.name!r}: shape {self.shape} has a negative length")
        # A length of 0 hides none of the others: whoever makes the tensor multiplies them too.
        if math.prod(length or 1 for length in self.shape) * DTYPE_BYTES[self.dtype] > _LARGEST_TENSOR_BYTES:
            raise ValueError(f"tensor {self.name!r}: no memory can hold the shape {str(self.shape)[:80]}")

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class CheckpointSource(Protocol):
    """A state of the training as it was at one moment: parameters, buffers and optimizer state.

    The writer asks for `tensors` once and then reads each of them once, from one thread: those with the largest
    elements first, as the file format wants it, else in this order. So a source may let go of a tensor when the next
    one is read. The writer calls close() in the end, whether it succeeded or not.
    """

    @property
    def step(self) -> int:
        """How many updates the state has seen."""

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """What there is, in the order in which it is best read."""

    def read(self, tensor: SavedTensor) -> Iterator[memoryview]:
        """The bytes of a tensor in row-major order, in pieces of any length, `tensor.nbytes` in total.

        Each piece is valid until the next one is asked for, so that a source of bounded memory can serve a state of
        any size. No byte changes between the moment of the state and close(), whatever training does meanwhile.

        Raises:
            OSError, CoarseError: If the state cannot be read any more; the checkpoint is then given up.
        """

    def close(self) -> None:
        """Lets the state go. Idempotent."""


class ArraySource:
    """A state that lies in arrays of this process, which nobody writes to until close().

    Args:
        step: How many updates it has seen.
        arrays: The bytes of each tensor: C-contiguous arrays of any dtype, with `tensor.nbytes` bytes.

    Raises:
        ValueError: If an array has another length than its tensor, or is not contiguous.
    """

    def __init__(self, step: int, arrays: Mapping[SavedTensor, npt.NDArray[Any]]) -> None:
        self.step = step
        self.tensors: Sequence[SavedTensor] = tuple(arrays)
        self._bytes = {tensor: _bytes_of(array, tensor) for tensor, array in arrays.items()}

    def read(self, tensor: SavedTensor) -> Iterator[memoryview]:
        data = self._bytes[tensor]
        for start in range(0, len(data), _READ_BYTES):
            yield data[start : start + _READ_BYTES]

    def close(self) -> None:
        self._bytes = {}


def _bytes_of(array: npt.NDArray[Any], tensor: SavedTensor) -> memoryview:
    if array.nbytes != tensor.nbytes or not array.flags.c_contiguous:
        raise ValueError(
            f"tensor {tensor.name!r} needs {tensor.nbytes} bytes in a row; its array has {array.nbytes} and is "
            f"{'' if array.flags.c_contiguous else 'not '}contiguous"
        )
    return array.reshape(-1).view(np.uint8).data

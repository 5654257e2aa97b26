"""A worker's requests about a snapshot in the memory devices (docs/design/storage.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from coarse.checkpoint.source import DTYPE_BYTES, SavedTensor
from coarse.checkpoint.writer import SaveDetails, WriteOptions
from coarse.errors import ProtocolError
from coarse.wire.messages import Message

_MOST_DIMENSIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensor:
    """A tensor of a checkpoint whose bytes a snapshot refers to.

    Args:
        saved: Its name and shape in the checkpoint.
        tensor, array: Number of its parameter, and number of the array in GroupSnapshots.
        order: Its dimensions in memory order, the slowest first; (0, 1, ...) if row-major.
    """

    saved: SavedTensor
    tensor: int
    array: int
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.saved.shape))):
            raise ValueError(f"{self.saved.name}: {self.order} is not an order of its dimensions")

    @property
    def is_row_major(self) -> bool:
        """Whether its bytes already have the order of the checkpoint."""
        return self.order == tuple(range(len(self.order)))

    def to_row_major(self, contents: bytes) -> memoryview[Any]:
        """Its bytes in the order of the checkpoint."""
        item = np.dtype(f"V{DTYPE_BYTES[self.saved.dtype]}")
        array = np.frombuffer(contents, dtype=item).reshape([self.saved.shape[d] for d in self.order])
        restored = np.ascontiguousarray(array.transpose(np.argsort(self.order)))
        return memoryview(restored.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTensor:
    """A small tensor whose bytes the worker sends with the request.

    Args:
        saved: Its name and shape in the checkpoint.
        offset: Offset of its bytes in the sent data.
    """

    saved: SavedTensor
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotContents:
    """The contents of a checkpoint: tensors of a snapshot and sent tensors.

    Args:
        step: Number of updates in the snapshot.
        kept: Tensors that the snapshot refers to.
        sent: Tensors that came with the request.
    """

    step: int
    kept: tuple[KeptTensor, ...]
    sent: tuple[SentTensor, ...] = ()

    def to_message(self) -> Message:
        """The message in which a worker requests them."""
        return {
            "step": self.step,
            "kept": [[*_fields(each.saved), each.tensor, each.array, list(each.order)] for each in self.kept],
            "sent": [[*_fields(each.saved), each.offset] for each in self.sent],
        }

    @classmethod
    def from_message(cls, message: Message) -> SnapshotContents:
        """Reads to_message().

        Raises:
            ProtocolError: If any field is invalid.
        """
        try:
            return cls(
                step=int(message["step"]),
                kept=tuple(
                    KeptTensor(
                        saved=_saved(name, dtype, shape),
                        tensor=int(tensor),
                        array=int(array),
                        order=tuple(map(int, order)),
                    )
                    for name, dtype, shape, tensor, array, order in message["kept"]
                ),
                sent=tuple(
                    SentTensor(saved=_saved(name, dtype, shape), offset=int(offset))
                    for name, dtype, shape, offset in message["sent"]
                ),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"a snapshot request cannot be read: {error!r}") from None


def write_request(folder: str, details: SaveDetails, options: WriteOptions) -> Message:
    """The fields of a request to write a snapshot, in addition to its SnapshotContents."""
    return {"folder": folder, "details": asdict(details), "options": asdict(options)}


def _fields(tensor: SavedTensor) -> list[Any]:
    return [tensor.name, tensor.dtype, list(tensor.shape)]


def _saved(name: object, dtype: object, shape: list[int]) -> SavedTensor:
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {len(shape)} dimensions")
    return SavedTensor(name=str(name), dtype=str(dtype), shape=tuple(map(int, shape)))

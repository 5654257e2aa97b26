"""What a worker asks of a snapshot in the memory devices (docs/design/storage.md)."""

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
        saved: What the checkpoint calls it.
        tensor, array: Where it lies: the number of its parameter, and GroupSnapshots' of the array.
        order: Its dimensions as they lie in memory, the slowest first; (0, 1, ...) if that is row-major.
    """

    saved: SavedTensor
    tensor: int
    array: int
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.saved.shape))):
            raise ValueError(f"{self.saved.name}: {self.order} is no order of its dimensions")

    @property
    def is_row_major(self) -> bool:
        """Whether its bytes are those of the checkpoint as they lie."""
        return self.order == tuple(range(len(self.order)))

    def to_row_major(self, contents: bytes) -> memoryview[Any]:
        """Its bytes in the order of the checkpoint."""
        item = np.dtype(f"V{DTYPE_BYTES[self.saved.dtype]}")
        array = np.frombuffer(contents, dtype=item).reshape([self.saved.shape[d] for d in self.order])
        restored = np.ascontiguousarray(array.transpose(np.argsort(self.order)))
        return memoryview(restored.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTensor:
    """A small tensor that the worker itself has sent along.

    Args:
        saved: What the checkpoint calls it.
        offset: Where its bytes begin in what was sent.
    """

    saved: SavedTensor
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotContents:
    """What of a snapshot, and beside it, a checkpoint is to hold.

    Args:
        step: How many updates it has seen.
        kept: Tensors that the snapshot refers to.
        sent: Tensors that came with the request.
    """

    step: int
    kept: tuple[KeptTensor, ...]
    sent: tuple[SentTensor, ...] = ()

    def to_message(self) -> Message:
        """The form in which a worker asks for it."""
        return {
            "step": self.step,
            "kept": [[*_fields(each.saved), each.tensor, each.array, list(each.order)] for each in self.kept],
            "sent": [[*_fields(each.saved), each.offset] for each in self.sent],
        }

    @classmethod
    def from_message(cls, message: Message) -> SnapshotContents:
        """Reads to_message().

        Raises:
            ProtocolError: If anything in it cannot be.
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
            raise ProtocolError(f"what is asked of a snapshot cannot be read: {error!r}") from None


def write_request(folder: str, details: SaveDetails, options: WriteOptions) -> Message:
    """What a request to write a snapshot says beside its SnapshotContents."""
    return {"folder": folder, "details": asdict(details), "options": asdict(options)}


def _fields(tensor: SavedTensor) -> list[Any]:
    return [tensor.name, tensor.dtype, list(tensor.shape)]


def _saved(name: object, dtype: object, shape: list[int]) -> SavedTensor:
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {len(shape)} dimensions")
    return SavedTensor(name=str(name), dtype=str(dtype), shape=tuple(map(int, shape)))

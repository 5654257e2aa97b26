"""A snapshot in the memory devices as what a checkpoint is written from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coarse.checkpoint.source import DTYPE_BYTES, SavedTensor
from coarse.errors import ProtocolError
from coarse.proxy.group_snapshots import GroupSnapshots
from coarse.proxy.protocol import Message

logger = logging.getLogger(__name__)

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


class SnapshotSource:
    """A CheckpointSource over a snapshot, in the process of its home device.

    Lets go of each tensor while it is read, so that its memory is free for the updates of training.

    Args:
        snapshots: Of the group.
        number: Which snapshot.
        contents: What the checkpoint is to hold.
        sent: The bytes of contents.sent.

    Raises:
        ProtocolError: If the snapshot's arrays, or what was sent, have other lengths than their tensors.
    """

    def __init__(
        self, snapshots: GroupSnapshots, number: int, contents: SnapshotContents, sent: memoryview[Any]
    ) -> None:
        self.step = contents.step
        self._snapshots = snapshots
        self._number = number
        self._kept = {each.saved: each for each in contents.kept}
        self._sent = {each.saved: sent[each.offset :][: each.saved.nbytes] for each in contents.sent}
        self.tensors: Sequence[SavedTensor] = (*self._kept, *self._sent)
        # Tied parameters have several names.
        self._reads_left = Counter((each.tensor, each.array) for each in contents.kept)
        for tensor in self.tensors:
            self._check(tensor)

    def read(self, tensor: SavedTensor) -> Iterator[memoryview[Any]]:
        sent = self._sent.get(tensor)
        if sent is not None:
            yield sent
            return
        kept = self._kept[tensor]
        place = (kept.tensor, kept.array)
        self._reads_left[place] -= 1
        pieces = self._snapshots.read(self._number, *place, lets_go=self._reads_left[place] == 0)
        if kept.is_row_major:
            yield from pieces
        else:
            yield kept.to_row_major(b"".join(pieces))

    def close(self) -> None:
        self._snapshots.release(self._number)

    def log_pool(self) -> None:
        """Logs what old versions have cost so far, as a warning if updates had to wait for room."""
        found = self._snapshots.statistics()
        level = logging.WARNING if found.num_waits else logging.INFO
        logger.log(
            level,
            "[step %d] %s: old versions took up to %.1f of %.1f MiB; %d updates waited %.2f s for room in all, %d "
            "snapshots were given up (COARSE_SNAPSHOT_POOL_BYTES)",
            self.step,
            self._snapshots.name,
            found.peak_bytes / 2**20,
            found.limit_bytes / 2**20,
            found.num_waits,
            found.waited_s,
            found.num_lost,
        )

    def _check(self, tensor: SavedTensor) -> None:
        kept, sent = self._kept.get(tensor), self._sent.get(tensor)
        if kept is not None:
            found = self._snapshots.num_bytes(kept.tensor, kept.array)
        elif sent is not None:
            found = len(sent)
        if found != tensor.nbytes:
            raise ProtocolError(f"{tensor.name} has {tensor.nbytes} bytes, what holds it {found}")


def _fields(tensor: SavedTensor) -> list[Any]:
    return [tensor.name, tensor.dtype, list(tensor.shape)]


def _saved(name: object, dtype: object, shape: list[int]) -> SavedTensor:
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {len(shape)} dimensions")
    return SavedTensor(name=str(name), dtype=str(dtype), shape=tuple(map(int, shape)))

"""A snapshot in the memory devices as the source of a checkpoint."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from coarse.checkpoint.source import Reserve, SavedTensor, any_memory
from coarse.errors import ProtocolError
from coarse.proxy.snapshots.group_snapshots import GroupSnapshots
from coarse.wire.snapshots import SnapshotContents

logger = logging.getLogger(__name__)


class SnapshotSource:
    """A CheckpointSource over a snapshot, in the process of its home device.

    Frees each tensor while it is read, so that training's updates can use its memory.

    Args:
        snapshots: Snapshots of the group.
        number: Number of the snapshot.
        contents: Contents of the checkpoint.
        sent: The bytes of contents.sent.

    Raises:
        ProtocolError: If the lengths of the snapshot's arrays or of the sent data differ from their tensors.
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

    def read(self, tensor: SavedTensor, reserve: Reserve = any_memory) -> Iterator[memoryview[Any]]:
        sent = self._sent.get(tensor)
        if sent is not None:
            yield sent
            return
        kept = self._kept[tensor]
        place = (kept.tensor, kept.array)
        self._reads_left[place] -= 1
        pieces = self._snapshots.read(
            self._number,
            *place,
            lets_go=self._reads_left[place] == 0,
            reserve=reserve if kept.is_row_major else any_memory,  # all pieces are needed at once
        )
        if kept.is_row_major:
            yield from pieces
        else:
            yield kept.to_row_major(b"".join(pieces))

    def close(self) -> None:
        self._snapshots.release(self._number)

    def log_pool(self) -> None:
        """Logs the cost of old versions so far, as a warning if updates had to wait for pool memory."""
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

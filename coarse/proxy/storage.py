"""Parameter storage of a memory device: a key-value table, tensor id to value and version (paper, section IV-B)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from coarse.errors import SnapshotLostError
from coarse.wire.segments import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A value of one key.

    Args:
        version: 1 for the first value of the key, one more for each later one; 0 if none was stored.
        segment: Its bytes; None if none was stored.
    """

    version: int
    segment: Segment | None


_NOTHING = StoredTensor(version=0, segment=None)


class Storage(Protocol):
    """The values that a memory device keeps for its workers. Used from the control thread alone."""

    def put(self, key: str, segment: Segment) -> int:
        """Makes `segment` the value of `key` and takes ownership of it; returns its version.

        Processes that have mapped the previous value, and snapshots that refer to it, keep it unchanged.
        """

    def get(self, key: str, snapshot: int = 0) -> StoredTensor:
        """The newest value of `key`, or the one that a snapshot refers to; version 0 if none was stored.

        Raises:
            SnapshotLostError: If the snapshot does not exist.
        """

    def keys(self) -> Iterable[str]:
        """All keys that have a value."""

    def snapshot(self) -> int:
        """Begins a snapshot of all current values; returns its number, from 1."""

    def release(self, snapshot: int) -> None:
        """Releases a snapshot, and frees versions to which no other snapshot refers. Idempotent."""

    def close(self) -> None:
        """Frees all values. Idempotent."""


class VersionedStorage:
    """Keeps the newest version of each tensor, and older ones as long as a snapshot refers to them.

    A value never changes: a new one replaces it. Thus no reader sees half a value, and an old version lives exactly
    as long as a snapshot refers to it or a process maps it. Parameters that an optimizer updates in place are not
    such values; native code copies them before an update (kernels/include/coarse/snapshot/snapshot.hpp).
    """

    def __init__(self) -> None:
        self._values: dict[str, StoredTensor] = {}
        self._snapshots: dict[int, dict[str, StoredTensor]] = {}
        self._last_snapshot = 0
        self._references: Counter[tuple[str, int]] = (
            Counter()
        )  # number of snapshots that refer to a version of a key

    def put(self, key: str, segment: Segment) -> int:
        previous = self.get(key)
        self._values[key] = StoredTensor(version=previous.version + 1, segment=segment)
        if previous.segment is not None and not self._references[key, previous.version]:
            previous.segment.close()
        return previous.version + 1

    def get(self, key: str, snapshot: int = 0) -> StoredTensor:
        if snapshot and snapshot not in self._snapshots:
            raise SnapshotLostError(f"storage: snapshot {snapshot} was released or never begun")
        return (self._snapshots[snapshot] if snapshot else self._values).get(key, _NOTHING)

    def keys(self) -> Iterable[str]:
        return self._values.keys()

    def snapshot(self) -> int:
        self._last_snapshot += 1
        self._snapshots[self._last_snapshot] = dict(self._values)
        self._references.update((key, value.version) for key, value in self._values.items())
        return self._last_snapshot

    def release(self, snapshot: int) -> None:
        for key, value in self._snapshots.pop(snapshot, {}).items():
            self._references[key, value.version] -= 1
            if self._references[key, value.version] > 0:
                continue
            del self._references[key, value.version]
            if value.version != self.get(key).version and value.segment is not None:
                value.segment.close()

    def close(self) -> None:
        for snapshot in list(self._snapshots):
            self.release(snapshot)
        for value in self._values.values():
            if value.segment is not None:
                value.segment.close()
        self._values.clear()

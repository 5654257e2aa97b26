"""Parameter storage of a memory device: a key-value table, tensor id to value and version (paper, section III-D)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from coarse.errors import OutOfDeviceMemoryError, SnapshotLostError
from coarse.wire.segments import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A value of one key.

    Args:
        version: 1 for the first value of the key, one more for each later one; 0 if there is none.
        segment: Its bytes; None if there is none.
    """

    version: int
    segment: Segment | None

    @property
    def num_bytes(self) -> int:
        """Length of the value."""
        return 0 if self.segment is None else self.segment.num_bytes


_NOTHING = StoredTensor(version=0, segment=None)


class Storage(Protocol):
    """What a memory device keeps for its workers. Used from the control thread alone."""

    def put(self, key: str, segment: Segment) -> int:
        """Makes `segment`, which now belongs to the storage, the value of `key`; returns its version.

        Who has mapped the value before keeps it as it was, and so does every snapshot that refers to it.

        Raises:
            OutOfDeviceMemoryError: If a snapshot refers to the value before, and there is no room for old versions;
                nothing has changed, and the segment stays the caller's.
        """

    def get(self, key: str, snapshot: int = 0) -> StoredTensor:
        """The newest value of `key`, or the one that a snapshot refers to; version 0 if there is none.

        Raises:
            SnapshotLostError: If there is no such snapshot.
        """

    def keys(self) -> Iterable[str]:
        """All keys that have a value."""

    def snapshot(self) -> int:
        """Begins a snapshot of all values as they are now; returns its number, from 1 on."""

    def release(self, snapshot: int) -> None:
        """Lets a snapshot go: versions to which no other one refers are freed. Idempotent."""

    def close(self) -> None:
        """Gives all values up. Idempotent."""


class VersionedStorage:
    """Keeps the newest version of each tensor, and older ones as long as a snapshot refers to them.

    A value is never changed: a new one takes its place. So nobody ever sees half a value, and an old version lives
    exactly as long as a snapshot refers to it or somebody maps it. Parameters that an optimizer updates in place are
    no such values; what copies those before an update is native (kernels/include/coarse/snapshot/snapshot.hpp).

    Args:
        pool_bytes: What old versions may take together. Where they would take more, put() is refused until a
            snapshot is released: that is the storage's back-pressure, for a control thread cannot wait.
    """

    def __init__(self, pool_bytes: int = sys.maxsize) -> None:
        self._pool_bytes = pool_bytes
        self._values: dict[str, StoredTensor] = {}
        self._snapshots: dict[int, dict[str, StoredTensor]] = {}
        self._last_snapshot = 0
        self._references: Counter[tuple[str, int]] = Counter()  # of snapshots, to a version of a key
        self.old_bytes = 0
        """What versions take that snapshots alone refer to."""

    def put(self, key: str, segment: Segment) -> int:
        previous = self.get(key)
        is_kept = self._references[key, previous.version] > 0
        if is_kept and self.old_bytes + previous.num_bytes > self._pool_bytes:
            raise OutOfDeviceMemoryError(
                f"stored tensor {key[:100]!r}: {previous.num_bytes} bytes of its version {previous.version} do "
                f"not fit beside {self.old_bytes} of {self._pool_bytes} bytes of old versions; release a snapshot "
                "first"
            )
        self._values[key] = StoredTensor(version=previous.version + 1, segment=segment)
        if is_kept:
            self.old_bytes += previous.num_bytes
        elif previous.segment is not None:
            previous.segment.close()
        return previous.version + 1

    def get(self, key: str, snapshot: int = 0) -> StoredTensor:
        if snapshot and snapshot not in self._snapshots:
            raise SnapshotLostError(f"storage: snapshot {snapshot} was released, or never begun")
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
                self.old_bytes -= value.num_bytes
                value.segment.close()

    def close(self) -> None:
        for snapshot in list(self._snapshots):
            self.release(snapshot)
        for value in self._values.values():
            if value.segment is not None:
                value.segment.close()
        self._values.clear()

"""Parameter storage of a memory device: a key-value table, tensor id to value and version (paper, section III-D)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from coarse.proxy.memory import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A value of one key.

    Args:
        version: 1 for the first value of the key, one more for each later one; 0 if there is none.
        segment: Its bytes; None if there is none.
    """

    version: int
    segment: Segment | None


class Storage(Protocol):
    """What a memory device keeps for its workers. Used from the control thread alone."""

    def put(self, key: str, segment: Segment) -> int:
        """Makes `segment`, which now belongs to the storage, the value of `key`; returns its version.

        Who has mapped the value before keeps it as it was.
        """

    def get(self, key: str) -> StoredTensor:
        """The newest value of `key`; version 0 if it has none."""

    def keys(self) -> Iterable[str]:
        """All keys that have a value."""

    def close(self) -> None:
        """Gives all values up. Idempotent."""


class VersionedStorage:
    """Keeps the newest version of each tensor. A value is never changed: a new one takes its place.

    So nobody ever sees half a value, and an old version lives exactly as long as somebody maps it.
    """

    def __init__(self) -> None:
        self._values: dict[str, StoredTensor] = {}

    def put(self, key: str, segment: Segment) -> int:
        previous = self.get(key)
        self._values[key] = StoredTensor(version=previous.version + 1, segment=segment)
        if previous.segment is not None:
            previous.segment.close()
        return previous.version + 1

    def get(self, key: str) -> StoredTensor:
        return self._values.get(key, StoredTensor(version=0, segment=None))

    def keys(self) -> Iterable[str]:
        return self._values.keys()

    def close(self) -> None:
        for value in self._values.values():
            if value.segment is not None:
                value.segment.close()
        self._values.clear()

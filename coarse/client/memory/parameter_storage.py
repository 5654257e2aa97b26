"""A worker's access to the parameter storage of the memory devices (COARSE paper, section III-D)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from coarse.client.control.connection import DeviceConnection
from coarse.client.control.requests import Requests
from coarse.client.memory.stored_value import StoredValue
from coarse.errors import SnapshotLostError
from coarse.wire.messages import Received, int_field
from coarse.wire.segments import Segment
from coarse.wire.storage import holders_of


class ParameterStorage:
    """Stores each value at the memory device to which its key belongs.

    Args:
        connections: One to each memory device.
        requests: Waits for the devices' replies.
        replicas: Extra copies of each value on other memory devices.
    """

    def __init__(
        self, connections: Sequence[DeviceConnection], requests: Requests, *, replicas: int = 0
    ) -> None:
        self._connections = connections
        self._requests = requests
        self._replicas = replicas

    def store(self, key: str, *pieces: memoryview[Any]) -> int:
        """Stores a value, whose pieces are written one after the other; returns its version.

        Values loaded earlier stay as they are; later loads return this whole value.
        """
        versions = [
            self._store_at(self._connections[device], key, pieces)
            for device in holders_of(key, len(self._connections), self._replicas)
        ]
        return versions[0]

    def _store_at(self, connection: DeviceConnection, key: str, pieces: Sequence[memoryview[Any]]) -> int:
        num_bytes = sum(piece.nbytes for piece in pieces)
        connection.send({"type": "reserve", "key": key, "num_bytes": num_bytes})
        reserved = self._requests.wait_for(connection, "reserved", f"storage of {key!r}")
        segment = _take(reserved)
        segment.write(pieces)
        segment.close()
        connection.send({"type": "commit"})
        return int(self._requests.wait_for(connection, "committed", f"storage of {key!r}").message["version"])

    def load(self, key: str) -> StoredValue:
        """The newest value of `key`, by any worker; version 0 and no bytes if none was stored."""
        return self._look_up(key, 0)

    def snapshot(self) -> StorageSnapshot:
        """Begins a snapshot of all values. Each memory device takes its own, at a moment before this returns.

        Raises:
            SnapshotsBusyError: If this worker holds too many snapshots.
        """
        numbers: list[int] = []
        try:
            for connection in self._connections:
                connection.send({"type": "snapshot_storage"})
                reply = self._requests.wait_for(connection, "storage_snapshot", "a snapshot of stored values")
                numbers.append(int(reply.message["snapshot"]))
        except BaseException:
            self._release(numbers)
            raise
        return StorageSnapshot(
            lambda key: self._look_up(key, numbers[self._device_of(key)]), lambda: self._release(numbers)
        )

    def _release(self, numbers: Sequence[int]) -> None:
        for connection, number in zip(self._connections, numbers, strict=False):
            connection.send({"type": "release_storage", "snapshot": number})

    def _look_up(self, key: str, snapshot: int) -> StoredValue:
        connection = self._connections[self._device_of(key)]
        connection.send({"type": "lookup", "key": key, "snapshot": snapshot})
        found = self._requests.wait_for(connection, "found", f"storage of {key!r}")
        version = int(found.message["version"])
        if not found.fds:
            return StoredValue(version=version, value=memoryview(b""))
        num_bytes = int_field(found.message, "num_bytes", low=1)
        segment = _take(found)
        value = segment.map(read_only=True)[:num_bytes]
        segment.close()
        return StoredValue(version=version, value=value)

    def _device_of(self, key: str) -> int:
        return holders_of(key, len(self._connections))[0]


class StorageSnapshot:
    """All stored values of a node at the start of the snapshot; later values do not change it.

    Values that were replaced since then use memory until release(). Release it, or use it in a `with` block.
    Session.snapshot_stored() creates it. One caller at a time, as for the session.
    """

    def __init__(self, load: Callable[[str], StoredValue], release: Callable[[], None]) -> None:
        self._load = load
        self._release: Callable[[], None] | None = release

    def load(self, key: str) -> StoredValue:
        """The value of `key` at the start of the snapshot; version 0 and no bytes if none was stored.

        Raises:
            SnapshotLostError: After release().
        """
        if self._release is None:
            raise SnapshotLostError(f"stored value {key[:100]!r}: this snapshot was released")
        return self._load(key)

    def release(self) -> None:
        """Frees the snapshot and the values that only it refers to. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> StorageSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _take(answer: Received) -> Segment:
    """The segment that came with a reply."""
    return Segment.received(answer.fds.pop(), answer.message["extent"])

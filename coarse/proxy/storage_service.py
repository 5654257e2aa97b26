"""Serves workers' requests to store and load values in a memory device's parameter storage."""

from __future__ import annotations

from collections import defaultdict

from coarse.errors import (
    CoarseError,
    OutOfDeviceMemoryError,
    ProtocolError,
    SnapshotLostError,
    SnapshotsBusyError,
)
from coarse.proxy.memory.values import ValueMemory
from coarse.proxy.outbox import SendToWorker
from coarse.proxy.storage import Storage
from coarse.wire.messages import Message, int_field, text_field
from coarse.wire.segments import Segment

MOST_STORAGE_SNAPSHOTS = 16
"""Limit of concurrent snapshots of one worker: each may keep a version of every value."""


class StorageService:
    """Serves the storage messages of docs/design/control-protocol.md. Used from the control thread alone.

    Args:
        memory: The memory of the values.
        send: Sends a reply to a worker.
        storage: Keeps the values; the caller closes it.
    """

    def __init__(self, memory: ValueMemory, send: SendToWorker, storage: Storage) -> None:
        self._memory = memory
        self._send = send
        self._storage = storage
        self._reserved: dict[int, tuple[str, Segment]] = {}  # being written, by client
        self._snapshots: defaultdict[int, set[int]] = defaultdict(set)  # begun and not released, by client

    def reserve(self, client: int, message: Message) -> None:
        """Gives a worker memory for a new value."""
        self.forget(client)
        num_bytes = int_field(message, "num_bytes", low=1)
        key = text_field(message, "key")
        try:
            segment = self._memory.reserve(_label(key), num_bytes)
        except OutOfDeviceMemoryError as error:
            self._refuse(client, error)
            return
        self._reserved[client] = (key, segment)
        self._send(client, {"type": "reserved", "extent": segment.extent}, (segment.fd,))

    def commit(self, client: int, message: Message) -> None:
        """Makes a value that a worker has written the newest version."""
        del message
        if client not in self._reserved:
            raise ProtocolError("commit arrived without a reservation")
        key, segment = self._reserved.pop(client)
        try:
            segment = self._memory.commit(_label(key), segment)
        except OutOfDeviceMemoryError as error:
            segment.close()
            self._refuse(client, error)
            return
        self._send(client, {"type": "committed", "version": self._storage.put(key, segment)}, ())

    def look_up(self, client: int, message: Message) -> None:
        """Sends the number and the read-only bytes of the newest version, or of a snapshot's version."""
        try:
            found = self._storage.get(text_field(message, "key"), int_field(message, "snapshot"))
            segment = None if found.segment is None else self._memory.open(found.segment)
        except (SnapshotLostError, OutOfDeviceMemoryError) as error:
            self._refuse(client, error)
            return
        reply: Message = {"type": "found", "version": found.version}
        if segment is None:
            self._send(client, reply, ())
            return
        reply |= {"num_bytes": segment.num_bytes, "extent": segment.extent}
        self._send(client, reply, (segment.fd,))
        segment.close()

    def take_snapshot(self, client: int, message: Message) -> None:
        """Begins a snapshot of all current values, which ends at the latest with the worker."""
        del message
        if len(self._snapshots[client]) >= MOST_STORAGE_SNAPSHOTS:
            error = SnapshotsBusyError(
                f"worker {client} of this node holds {MOST_STORAGE_SNAPSHOTS} snapshots of stored values, the "
                "maximum; release one first"
            )
            self._refuse(client, error)
            return
        snapshot = self._storage.snapshot()
        self._snapshots[client].add(snapshot)
        self._send(client, {"type": "storage_snapshot", "snapshot": snapshot}, ())

    def release_snapshot(self, client: int, message: Message) -> None:
        """Releases a snapshot that a worker no longer needs."""
        snapshot = int_field(message, "snapshot")
        if snapshot in self._snapshots[client]:
            self._snapshots[client].remove(snapshot)
            self._storage.release(snapshot)

    def forget(self, client: int) -> None:
        """Frees memory that the worker has reserved but not committed."""
        if client in self._reserved:
            self._reserved.pop(client)[1].close()

    def leave(self, client: int) -> None:
        """Handles a worker's leaving: forget(), and releases its snapshots."""
        self.forget(client)
        for snapshot in self._snapshots.pop(client, ()):
            self._storage.release(snapshot)

    def _refuse(self, client: int, error: CoarseError) -> None:
        self._send(client, {"type": "refused", "error": type(error).__name__, "text": str(error)}, ())

    def close(self) -> None:
        """Frees all memory that was reserved but not committed."""
        for client in [*self._reserved, *self._snapshots]:
            self.leave(client)


def _label(key: str) -> str:
    return f"stored tensor {key[:100]!r}"

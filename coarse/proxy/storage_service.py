"""How workers put values into the parameter storage of a memory device and look them up."""

from __future__ import annotations

import os

from coarse.errors import OutOfDeviceMemoryError, ProtocolError
from coarse.proxy.memory import DeviceMemory, Segment
from coarse.proxy.outbox import SendToWorker
from coarse.proxy.protocol import Message, int_field, text_field
from coarse.proxy.storage import Storage


class StorageService:
    """Serves the storage messages of docs/design/control-protocol.md. Used from the control thread alone.

    Args:
        memory: Where values lie.
        send: Answers a worker.
        storage: Keeps the values; stays the caller's.
    """

    def __init__(self, memory: DeviceMemory, send: SendToWorker, storage: Storage) -> None:
        self._memory = memory
        self._send = send
        self._storage = storage
        self._reserved: dict[int, tuple[str, Segment]] = {}  # being written, by client

    def reserve(self, client: int, message: Message) -> None:
        """Gives a worker memory to write a new value into."""
        self.forget(client)
        num_bytes = int_field(message, "num_bytes", low=1)
        key = text_field(message, "key")
        try:
            segment = self._memory.allocate(f"stored tensor {key[:100]!r}", num_bytes)
        except OutOfDeviceMemoryError as error:
            self._refuse(client, error)
            return
        self._reserved[client] = (key, segment)
        self._send(client, {"type": "reserved"}, (segment.fd,))

    def commit(self, client: int, message: Message) -> None:
        """The value is written: it becomes the newest version."""
        del message
        if client not in self._reserved:
            raise ProtocolError("commit came without a reservation")
        key, segment = self._reserved.pop(client)
        try:
            version = self._storage.put(key, segment)
        except OutOfDeviceMemoryError as error:
            segment.close()
            self._refuse(client, error)
            return
        self._send(client, {"type": "committed", "version": version}, ())

    def look_up(self, client: int, message: Message) -> None:
        """Tells the newest version and shares its bytes, read-only."""
        found = self._storage.get(text_field(message, "key"))
        reply: Message = {"type": "found", "version": found.version}
        if found.segment is None:
            self._send(client, reply, ())
            return
        fd = found.segment.read_only_fd()
        self._send(client, reply, (fd,))
        os.close(fd)

    def forget(self, client: int) -> None:
        """Takes back what the worker reserved and has not committed."""
        if client in self._reserved:
            self._reserved.pop(client)[1].close()

    def _refuse(self, client: int, error: OutOfDeviceMemoryError) -> None:
        self._send(client, {"type": "refused", "error": type(error).__name__, "text": str(error)}, ())

    def close(self) -> None:
        """Takes back everything that was reserved and not committed."""
        for client in list(self._reserved):
            self.forget(client)

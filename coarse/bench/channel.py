"""Line-delimited JSON over a Unix socket, between the driver of a benchmark and its workers.

Standard input is not suitable, because mpirun forwards it only to rank 0.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from coarse import local_sockets

_CHUNK_BYTES = 1 << 16


class Channel:
    """One end of a connection that carries JSON objects. One thread sends, one thread receives.

    Args:
        connection: A connected stream socket; owned by the channel.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = bytearray()

    @classmethod
    def connect(cls, path: str) -> Channel:
        """Connects to the driver that listens at `path`.

        Raises:
            RendezvousError: If the listening process belongs to another user.
            OSError: If no process listens there.
        """
        return cls(local_sockets.connect(path, socket.SOCK_STREAM))

    def fileno(self) -> int:
        """File descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message.

        Raises:
            OSError: If the other end is gone.
        """
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Waits for one whole message.

        Raises:
            EOFError: If the other end is gone.
            ValueError: If the line is not a JSON object.
        """
        while b"\n" not in self._pending:
            self._read_some()
        line, _, rest = bytes(self._pending).partition(b"\n")
        self._pending = bytearray(rest)
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"expected a JSON object, got {message!r}")
        return message

    def close(self) -> None:
        """Closes this end."""
        self._connection.close()

    def _read_some(self) -> None:
        try:
            chunk = self._connection.recv(_CHUNK_BYTES)
        except ConnectionError:
            chunk = b""
        if not chunk:
            raise EOFError("the other end closed the connection")
        self._pending += chunk

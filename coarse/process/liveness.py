"""Notices the end of a process on another machine: that machine's kernel closes the connections to it."""

from __future__ import annotations

import contextlib
import socket

LIVENESS_BACKLOG = 1024
"""Backlog of a LivenessListener: one connection for each other node."""


class LivenessListener:
    """A socket that listens but never accepts: a connection to it lasts as long as this process.

    Args:
        listener: Listens at an address of this machine that others can reach; close() closes it.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        address = listener.getsockname()
        self.host: str = address[0]
        """The address at which it listens."""
        self.port: int = address[1]
        """The port at which it listens."""

    def close(self) -> None:
        """Closes the socket, which other nodes see as the end of the process. Idempotent."""
        self._listener.close()


class LivenessProbe:
    """Checks whether another process still exists. Never blocks.

    Args:
        host, port: Address of its LivenessListener; "" and 0 if it has none.
    """

    def __init__(self, host: str, port: int) -> None:
        self.problem = ""
        """Why the process cannot be reached, if known."""
        self._connection: socket.socket | None = None
        if not port:
            return
        with contextlib.suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._connection = socket.socket(family, kind, protocol)
            self._connection.setblocking(False)
            self._connection.connect_ex(address)

    def sees_end(self) -> bool:
        """Whether the process existed and has ended; False if it cannot be reached, because then nothing is known."""
        if self._connection is None:
            return False
        try:
            self._connection.recv(1)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        except OSError as error:
            self.problem = str(error.strerror)
            self.close()
            return False
        return True

    def close(self) -> None:
        """Stops checking. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

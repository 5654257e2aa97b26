"""How the end of a process is noticed on other machines: connections to it end, which its kernel sees to."""

from __future__ import annotations

import contextlib
import socket

_BACKLOG = 1024  # one for each other node


class Presence:
    """Listens, and never lets anybody in: others know by a connection that this process is there.

    Args:
        host: An address of this machine that others can reach.

    Raises:
        OSError: If this process cannot listen there.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """As if the process had ended. Idempotent."""
        self._listener.close()


class LivenessProbe:
    """Looks at whether another process is there. Never waits.

    Args:
        host, port: Of its Presence; "" and 0 if it has none.
    """

    def __init__(self, host: str, port: int) -> None:
        self.problem = ""
        """Why it cannot be reached, if that is known."""
        self._connection: socket.socket | None = None
        if not port:
            return
        with contextlib.suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._connection = socket.socket(family, kind, protocol)
            self._connection.setblocking(False)
            self._connection.connect_ex(address)

    def sees_end(self) -> bool:
        """Whether the process was there, and is not any more. Of one that cannot be reached nothing is known."""
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
        """Looks no longer. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

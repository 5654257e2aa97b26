"""Unix sockets through which processes of one user meet. Both ends check whose process the other one is."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from coarse.errors import RendezvousError
from coarse.security import private_directories

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end: those that connected, or that called listen()."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


@contextlib.contextmanager
def short_address(path: str | os.PathLike[str]) -> Iterator[str]:
    """Another name of a socket's place, while it is bound or connected to: its own may be too long for an address.

    Raises:
        OSError: If there is no such directory.
    """
    place = Path(path)
    directory_fd = os.open(place.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory_fd}/{place.name}"
    finally:
        os.close(directory_fd)


def connect(
    path: str | os.PathLike[str],
    kind: socket.SocketKind = socket.SOCK_SEQPACKET,
    *,
    timeout_s: float | None = None,
) -> socket.socket:
    """Connects to a socket of this user in a directory that this user alone can enter.

    Args:
        path: Where it listens.
        kind: Of the socket.
        timeout_s: Of the connection, from the start on; None to wait for ever.

    Raises:
        RendezvousError: If the directory or the listening process is another user's.
        OSError: If nobody listens there.
    """
    place = Path(path)
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.settimeout(timeout_s)
    try:
        with private_directories.entered(place.parent) as directory:
            connection.connect(str(directory / place.name))
        _require_own(connection, place)
    except PermissionError as error:
        connection.close()
        raise RendezvousError(
            f"refused to connect to {place}: {error}. Another user may be listening there in place of this "
            "job, or may have written to the store of its rendezvous."
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _require_own(connection: socket.socket, place: Path) -> None:
    pid, user = peer_of(connection)
    if user != os.geteuid():
        raise PermissionError(
            f"process {pid} of user {user} listens there, not a process of user {os.geteuid()}"
        )

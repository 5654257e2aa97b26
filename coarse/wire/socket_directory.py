"""The directory through which workers find the memory devices of their node during the start."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TOKEN_FILE = "token"
KEPT_FILE = "kept.json"


def socket_path(directory: str | os.PathLike[str], device: int) -> str:
    """The socket path of memory device `device` of the session in `directory`."""
    return str(Path(directory) / f"md{device}.sock")


class OwnSocket:
    """The socket of one memory device, in a directory that another session of the same name can replace.

    Args:
        path: Path of the existing socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._directory_fd = -1
        with contextlib.suppress(FileNotFoundError):  # its creator has ended and removed it
            self._directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def is_in_place(self) -> bool:
        """Whether the directory of that name is still the one in which this device started to listen."""
        try:
            return os.path.samestat(os.stat(self.path.parent), os.fstat(self._directory_fd))
        except OSError:
            return False

    def abandon(self) -> None:
        """Removes the socket, and with the last socket the directory, of a session that never began.

        Normally the leader does this, but it may have been killed.
        """
        if not self.is_in_place():
            return
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            # Fails while other devices still have their sockets there; the last one succeeds.
            left = {other.name for other in self.path.parent.iterdir()}
            if left <= {TOKEN_FILE, KEPT_FILE}:
                for name in left:
                    (self.path.parent / name).unlink()
            self.path.parent.rmdir()

    def close(self) -> None:
        """Closes the directory, so that the system may reuse its inode number. Idempotent."""
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1

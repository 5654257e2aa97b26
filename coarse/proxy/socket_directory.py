"""The directory through which workers find the memory devices of their node, while they come together."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TOKEN_FILE = "token"
KEPT_FILE = "kept.json"


def socket_path(directory: str | os.PathLike[str], device: int) -> str:
    """Where memory device `device` of the session in `directory` listens."""
    return str(Path(directory) / f"md{device}.sock")


def abandon_socket(path: Path) -> None:
    """Removes one device's socket, and with the last one the directory, in a session that never came about.

    That is the leader's duty, but it may have been killed.
    """
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        # Fails while other devices still have their sockets there; the last one succeeds.
        left = {other.name for other in path.parent.iterdir()}
        if left <= {TOKEN_FILE, KEPT_FILE}:
            for name in left:
                (path.parent / name).unlink()
        path.parent.rmdir()

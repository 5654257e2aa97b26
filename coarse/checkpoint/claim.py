"""Ensures that only one process saves to a folder of checkpoints; any process may read it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from dataclasses import dataclass

from coarse.checkpoint.folder import Folder

_NAME = "saving.lock"


@dataclass(slots=True)
class _Held:
    descriptor: int
    num_claims: int = 0


# By folder: closing any descriptor of a file loses the process's lock on it, so a process may open only one.
_held: dict[tuple[int, int], _Held] = {}
_guard = threading.Lock()


class Claim:
    """A process's exclusive claim to a folder; it ends with the process, however the process ends.

    Claims of one process do not exclude each other. A file system without locks grants every claim.

    Args:
        folder: The folder; the caller closes it.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._key: tuple[int, int] | None = None  # set while the claim is held

    def take(self) -> bool:
        """Tries to take the claim; returns whether this process now holds it. Idempotent.

        Raises:
            OSError: If the folder is not writable.
        """
        if self._key is not None:
            return True
        key = self._folder.identity
        with _guard:
            if key not in _held:
                descriptor = _locked(self._folder)
                if descriptor is None:
                    return False
                _held[key] = _Held(descriptor)
            _held[key].num_claims += 1
        self._key = key
        return True

    def release(self) -> None:
        """Releases the claim. Idempotent."""
        key, self._key = self._key, None
        if key is None:
            return
        with _guard:
            held = _held[key]
            held.num_claims -= 1
            if not held.num_claims:
                del _held[key]
                os.close(held.descriptor)


def _locked(folder: Folder) -> int | None:
    """A descriptor of the folder's lock; None if another process holds the lock.

    This process holds it, unless the file system has no locks: then nothing excludes other processes.
    """
    descriptor = folder.open_lock(_NAME)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(descriptor)
            return None
    return descriptor

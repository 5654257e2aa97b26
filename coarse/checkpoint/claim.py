"""That one process alone saves to a folder of checkpoints; any may read it."""

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


# By folder: a process loses its lock on a file when it closes any descriptor of it, so that it may have one alone.
_held: dict[tuple[int, int], _Held] = {}
_guard = threading.Lock()


class Claim:
    """Of a process on a folder, once it is taken; it ends with the process, however that ends.

    Claims of one process do not exclude each other. On a file system that has no locks every claim is granted.

    Args:
        folder: Stays the caller's.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._key: tuple[int, int] | None = None  # while it is taken

    def take(self) -> bool:
        """Whether this process has the claim from now on. Idempotent.

        Raises:
            OSError: If nothing can be written in the folder.
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
        """Gives it up. Idempotent."""
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
    """A descriptor of the folder's lock, which this process has now; None if another one has it."""
    descriptor = folder.open_lock(_NAME)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(descriptor)
            return None
    return descriptor

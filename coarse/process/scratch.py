"""Temporary directories that go with those who use them, even if these are killed.

Who uses one holds it by a lock, which ends with the process however that ends. Who makes one removes those of this
user that nobody holds any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_PREFIX = "coarse-scratch-"
_YOUNG_S = 60.0


class Scratch:
    """A directory of this user alone (mode 0700). Use it in a `with` block, or remove() it.

    Args:
        purpose: Part of its name.
        parent: Where to make it; the temporary directory if not given.

    Raises:
        OSError: If it cannot be made.
    """

    def __init__(self, purpose: str, *, parent: str | os.PathLike[str] | None = None) -> None:
        place = Path(parent or tempfile.gettempdir())
        for other in place.glob(f"{_PREFIX}*"):
            remove_if_abandoned(other)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=place))
        self._lock = hold(self.path)

    def remove(self) -> None:
        """Removes it with all that is in it. Idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def hold(directory: Path) -> int:
    """Marks a directory as used, until the returned descriptor is closed.

    Where a file system has no locks, nothing is taken for abandoned.

    Raises:
        FileNotFoundError: If there is no such directory.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def remove_if_abandoned(directory: Path) -> None:
    """Removes a directory of this user that nobody holds, unless it is so young that it may not be held yet."""
    with contextlib.suppress(OSError):
        found = directory.lstat()
        is_old = time.time() - found.st_mtime > _YOUNG_S
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or not is_old:
            return
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)

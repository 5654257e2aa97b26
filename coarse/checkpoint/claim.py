"""That one process alone saves to a folder of checkpoints; any may read it."""

from __future__ import annotations

import errno
import fcntl
import os

from coarse.checkpoint.folder import Folder

_NAME = "saving.lock"


class Claim:
    """Of a process on a folder, once it is taken; it ends with the process, however that ends.

    Claims of one process do not exclude each other. On a file system that has no locks every claim is granted.

    Args:
        folder: Stays the caller's, who closes it after the claim.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._descriptor = -1

    def take(self) -> bool:
        """Whether this process has the claim from now on. Idempotent.

        Raises:
            OSError: If nothing can be written in the folder.
        """
        if self._descriptor >= 0:
            return True
        descriptor = self._folder.open_lock(_NAME)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(descriptor)
                return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Gives it up. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

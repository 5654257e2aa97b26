"""Protects servers from unknown peers, which could exhaust descriptors or flood the log."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time

_WARNING_INTERVAL_S = 5.0


class RareWarnings:
    """Logs what strangers do, not more often than somebody reads. Use from one thread.

    Args:
        logger: Where.
        prefix: Put before each line.
    """

    def __init__(self, logger: logging.Logger, prefix: str) -> None:
        self._logger = logger
        self._prefix = prefix
        self._warned_s = -_WARNING_INTERVAL_S
        self._num_unwarned = 0

    def warn(self, text: str) -> None:
        """Logs it, or counts it for the next line."""
        now_s = time.monotonic()
        if now_s - self._warned_s < _WARNING_INTERVAL_S:
            self._num_unwarned += 1
            return
        more = f" (and {self._num_unwarned} similar events)" if self._num_unwarned else ""
        self._logger.warning("%s %s%s", self._prefix, text, more)
        self._warned_s, self._num_unwarned = now_s, 0


class Acceptor:
    """Takes connections, and turns them away where there is no descriptor for them: they would be announced for ever.

    Args:
        listener: A listening socket, which now belongs to this object; it stops blocking.
        warnings: Logs what was turned away.
    """

    def __init__(self, listener: socket.socket, warnings: RareWarnings) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._warnings = warnings
        self._spare_fd = _open_spare()

    def fileno(self) -> int:
        """The listening socket's descriptor; negative after close()."""
        return self._listener.fileno()

    def accept(self) -> socket.socket | None:
        """The next connection; None if there is none."""
        try:
            return self._listener.accept()[0]
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return None

    def close(self) -> None:
        """Stops listening. Idempotent."""
        self._listener.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1

    def _turn_away(self) -> None:
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._spare_fd = -1
        with contextlib.suppress(OSError):
            self._spare_fd = _open_spare()
        self._warnings.warn("turned a connection away: this process has reached its limit of open files")


def _open_spare() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

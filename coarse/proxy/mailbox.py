"""How other threads of a memory device have its control thread do something."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable

from coarse.proxy.event_loop import EventLoop


class Mailbox:
    """Runs on the control thread what other threads post.

    Args:
        loop: Of the control thread.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._posted: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # guards the descriptor against close()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.watch(self._event_fd, self._deliver)

    def post(self, function: Callable[[], None]) -> None:
        """Has `function` called; from any thread. Does nothing once the mailbox is closed."""
        with self._lock:
            if self._event_fd >= 0:
                self._posted.append(function)
                os.eventfd_write(self._event_fd, 1)

    def close(self) -> None:
        """Drops what was not called yet. Idempotent."""
        with self._lock:
            if self._event_fd >= 0:
                os.close(self._event_fd)
                self._event_fd = -1

    def _deliver(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        while self._posted:
            self._posted.popleft()()

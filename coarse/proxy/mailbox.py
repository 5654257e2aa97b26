"""Runs functions of other threads on a memory device's control thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable

from coarse.proxy.event_loop import EventLoop


class Mailbox:
    """Runs the functions that other threads post on the control thread.

    Args:
        loop: The control thread's event loop.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._posted: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # guards the descriptor against close()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.watch(self._event_fd, self._deliver)

    def post(self, function: Callable[[], None]) -> None:
        """Schedules a call of `function`; callable from any thread. Does nothing after close()."""
        with self._lock:
            if self._event_fd >= 0:
                self._posted.append(function)
                os.eventfd_write(self._event_fd, 1)

    def close(self) -> None:
        """Drops pending functions. Idempotent."""
        with self._lock:
            if self._event_fd >= 0:
                os.close(self._event_fd)
                self._event_fd = -1

    def _deliver(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        while self._posted:
            self._posted.popleft()()

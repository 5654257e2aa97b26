"""SIGTERM as a notice: a worker finishes its step and leaves, and the others go on (docs/guides/elastic.md)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

_CONFIRMED_AFTER_S = 0.5
"""Time for a launcher that ends all workers to send SIGTERM again, so that this worker ends at once."""


class TerminationNotice:
    """Notes a SIGTERM to this process instead of ending by it, while it is open.

    A second SIGTERM ends the process at once, and so does the first if `may_leave` returns False. A handler of the
    script, set before or after, replaces this one. In forks SIGTERM has its usual effect.

    Args:
        may_leave: Whether the job goes on if this worker leaves; called when the signal comes.
        tell: Called once when the notice is noted. Both are called in the main thread, between any two operations.
    """

    def __init__(self, may_leave: Callable[[], bool], tell: Callable[[], object]) -> None:
        self._may_leave = may_leave
        self._tell = tell
        self._came_s: float | None = None

    @property
    def has_come(self) -> bool:
        """Whether this worker is to leave at the end of its step."""
        return self._came_s is not None and time.monotonic() >= self._came_s + _CONFIRMED_AFTER_S

    def open(self) -> None:
        """Begins to note SIGTERM; does nothing outside of the main thread, or if the script handles the signal."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, self._take)
        close_in_fork = weakref.WeakMethod(self.close)
        os.register_at_fork(after_in_child=lambda: (close := close_in_fork()) is not None and close())

    def close(self) -> None:
        """Gives SIGTERM its usual effect back. Idempotent; does nothing outside of the main thread."""
        if signal.getsignal(signal.SIGTERM) == self._take:
            with contextlib.suppress(ValueError):  # in another thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._came_s is None and self._may_leave():
            self._came_s = time.monotonic()
            self._tell()
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

"""Waits for descriptors on the control thread of a memory device."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable


class EventLoop:
    """Calls back when descriptors can be read. One thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Calls `callback` whenever `fd` can be read or its other end is gone, until unwatch()."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        """Stops that; `fd` must still be open. Does nothing if it is not watched."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def run_once(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` and calls back what is due."""
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def close(self) -> None:
        """Forgets everything that is watched; the descriptors stay their owners'."""
        self._selector.close()

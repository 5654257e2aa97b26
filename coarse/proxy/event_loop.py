"""Waits for descriptors on the control thread of a memory device."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Watched:
    read: Callable[[], object]
    flush: Callable[[], bool] = lambda: True


class EventLoop:
    """Calls back when descriptors are readable or accept pending output. Single-threaded."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Calls `callback` whenever `fd` is readable or its other end is gone, until unwatch()."""
        self._selector.register(fd, selectors.EVENT_READ, _Watched(callback))

    def flush_later(self, fd: int, flush: Callable[[], bool]) -> None:
        """Calls `flush` whenever `fd` accepts output, until it returns True. Does nothing if `fd` is not watched."""
        with contextlib.suppress(KeyError):
            watched = self._selector.get_key(fd).data
            watched.flush = flush
            self._selector.modify(fd, selectors.EVENT_READ | selectors.EVENT_WRITE, watched)

    def unwatch(self, fd: int) -> None:
        """Stops watching `fd`, which must still be open. Does nothing if it is not watched."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def run_once(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` and runs the due callbacks."""
        for key, events in self._selector.select(timeout_s):
            if events & selectors.EVENT_WRITE and key.data.flush():
                self._stop_flushing(key)
            if events & selectors.EVENT_READ:
                key.data.read()

    def _stop_flushing(self, key: selectors.SelectorKey) -> None:
        current = self._selector.get_map().get(key.fd)
        if current is not None and current.data is key.data:
            self._selector.modify(key.fd, selectors.EVENT_READ, key.data)

    def close(self) -> None:
        """Stops watching everything; the owners close the descriptors."""
        self._selector.close()

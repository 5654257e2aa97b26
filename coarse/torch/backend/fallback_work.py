"""Work handles of the process group in Python, and their order; what native/work.hpp is in C++."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Work(dist.Work):  # type: ignore[misc]
    """One operation, and its result as a torch future. Whoever has waited for it finds the future completed.

    Args:
        result: What the future is completed with.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result
        self._error: Exception | None = None
        self._source = -1
        self._end: torch.futures.Future[None] = torch.futures.Future()
        # Of another future: what set_exception() sets is an error to Python alone, and to DDP's C++ a wrong result.
        self._future: torch.futures.Future[Any] = self._end.then(self._outcome)
        self._is_done = threading.Event()

    def complete(self, error: Exception | None = None, *, source: int = -1) -> None:
        """Called once, from any thread.

        Args:
            error: Why it failed; None if it has not.
            source: From which rank a message came.
        """
        self._error, self._source = error, source
        self._end.set_result(None)
        self._is_done.set()

    def _outcome(self, _: object) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def is_done_within(self, limit_s: float) -> bool:
        """Waits, and tells whether it has ended, well or not."""
        return self._is_done.wait(limit_s)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_done.wait(timeout.total_seconds() if timeout else None):
            raise dist.DistBackendError("coarse: Operation timed out!")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_done.is_set()

    def is_success(self) -> bool:
        return self._is_done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def _source_rank(self) -> int:
        self.wait()
        return self._source

    def result(self) -> Any:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class WorkQueue:
    """Runs operations one after the other, in the order in which they were given, in a thread of its own.

    Thread safety: all, from any thread.
    """

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self._last: Work | None = None
        self._is_stopped = False
        self._lock = threading.Lock()  # guards what is above: nothing is given behind the end
        # A daemon: the interpreter's end does not wait for other ranks. Whoever has the queue stops it before.
        self._thread = threading.Thread(target=self._serve, name="coarse-torch", daemon=True)
        self._thread.start()

    def run(self, work: Work, body: Callable[[], None]) -> None:
        """Has `body` run when all before it has; `work` gets its error."""
        with self._lock:
            if not self._is_stopped:
                self._given.put((work, body))
                self._last = work
                return
        work.complete(dist.DistBackendError("coarse: the process group was destroyed"))

    def drain(self, limit_s: float) -> None:
        """Waits until everything was run, at most so long."""
        if self._last is not None:
            self._last.is_done_within(limit_s)

    def stop(self) -> None:
        """Takes no more; returns when what was running has ended. What had not begun gets an error. Idempotent."""
        with self._lock:
            self._is_stopped = True
            self._given.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        while (given := self._given.get()) is not None:
            work, body = given
            error: Exception | None = None
            try:
                if self._is_stopped:
                    raise dist.DistBackendError("coarse: the process group was destroyed before this began")
                body()
            except Exception as failure:
                error = failure
            work.complete(error)
            del given, work, body, error  # what it holds goes now, not when the next one comes

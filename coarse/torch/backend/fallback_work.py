"""Work handles of the process group in Python; what native/work.hpp is in C++."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Work(dist.Work):  # type: ignore[misc]
    """One operation, and its result as a torch future."""

    def __init__(self, done: Future[Any], result: Any) -> None:
        super().__init__()
        self._done = done
        self._result = result
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        done.add_done_callback(self._complete)

    def _complete(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._done.result(timeout.total_seconds() if timeout else None)
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def is_success(self) -> bool:
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        return self._done.exception() if self._done.done() else None

    def _source_rank(self) -> int:
        return int(self._done.result())

    def result(self) -> Any:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

"""Limits calls of torch that would otherwise wait without limit, mainly for a store's answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from coarse.errors import RendezvousError

_T = TypeVar("_T")


class Call(Generic[_T]):
    """A call in a separate thread, which is abandoned if it does not end in time.

    Args:
        function: The function to call.
    """

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._results: list[_T] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="coarse-call", daemon=True)
        self._thread.start()

    def result(self, timeout_s: float) -> _T:
        """Returns or raises the function's result.

        Raises:
            TimeoutError: If it takes longer than `timeout_s` from now on; result() may be called again.
        """
        self._thread.join(timeout_s)
        if self._errors:
            raise self._errors[0]
        if not self._results:
            raise TimeoutError(f"no answer within {timeout_s:.1f} s")
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._errors.append(error)


def within(timeout_s: float, function: Callable[[], _T], what: str, *, patience_s: float = 0.0) -> _T:
    """Returns or raises the result of `function`.

    Args:
        timeout_s: COARSE_TIMEOUT_S.
        function: Called; it may wait for others.
        what: The subject of the error's message.
        patience_s: Waits longer by this, for a function that has the same limit and more to say.

    Raises:
        RendezvousError: If it takes longer.
    """
    try:
        return Call(function).result(timeout_s + patience_s)
    except TimeoutError:
        raise RendezvousError(
            f"{what} has not answered within {timeout_s:.1f} s (COARSE_TIMEOUT_S). It may be stopped, or a firewall "
            "may drop the messages, or a router translate addresses (NAT)."
        ) from None

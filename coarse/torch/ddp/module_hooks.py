"""Hooks of a wrapped module that are its own alone: copies of the module are free of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OwnHook:
    """Calls a function, whatever the hook is given; a copy of it, pickled or deep, does nothing.

    Args:
        function: What to call; None for nothing.
    """

    def __init__(self, function: Callable[[], object] | None = None) -> None:
        self._function = function

    def __call__(self, *_: Any) -> None:
        """As whatever kind of hook it is."""
        if self._function is not None:
            self._function()

    def __deepcopy__(self, _: dict[int, Any]) -> OwnHook:
        return OwnHook()

    def __reduce__(self) -> tuple[type[OwnHook], tuple[()]]:
        return OwnHook, ()

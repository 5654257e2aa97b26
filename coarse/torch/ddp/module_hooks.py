"""Hooks that belong only to one wrapped module; in copies of the module they do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OwnHook:
    """Calls a function without the hook's arguments; a copy of the hook, pickled or deep, does nothing.

    Args:
        function: The function to call, or None.
    """

    def __init__(self, function: Callable[[], object] | None = None) -> None:
        self._function = function

    def __call__(self, *_: Any) -> None:
        """Calls the function; accepts the arguments of every kind of hook."""
        if self._function is not None:
            self._function()

    def __deepcopy__(self, _: dict[int, Any]) -> OwnHook:
        return OwnHook()

    def __reduce__(self) -> tuple[type[OwnHook], tuple[()]]:
        return OwnHook, ()

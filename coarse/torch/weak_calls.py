"""Callbacks that do not keep their object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `method` while its object exists.

    A hook of a parameter with a direct reference would keep the object, and everything that it refers to, alive.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*arguments)

    return call

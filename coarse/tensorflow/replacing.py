"""Functions of another package that are called in a way of one's own, once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_is_replaced_by_coarse"


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Has a function take the place of `owner.name`, unless one has already.

    Args:
        owner: A class or module.
        name: Of its function, which the new one is given before its arguments.
    """
    original = getattr(owner, name)

    def replace(function: Callable[..., Any]) -> None:
        if hasattr(original, _MARK):
            return

        @functools.wraps(original)
        def replaced(*arguments: Any, **keywords: Any) -> Any:
            return function(original, *arguments, **keywords)

        setattr(replaced, _MARK, True)
        setattr(owner, name, replaced)

    return replace

"""Replaces functions of another package, once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_is_replaced_by_coarse"


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Returns a decorator that replaces `owner.name` by a function, unless that was done before.

    Args:
        owner: A class or module.
        name: Name of its function. The new function receives the original one as its first argument.
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

"""State dicts with and without the prefix "module." that wrapping adds.

Which of both a state dict is follows from how many keys of the module's own it holds either way, because a module may
itself have a child of the name "module".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

_PREFIX = "module."


def with_wrapper_prefix(state_dict: Any, *, own_keys: Collection[str]) -> Any:
    """Returns `state_dict` with the wrapper's prefix, whether it was saved from a wrapper or from a bare module.

    Args:
        state_dict: Is not changed.
        own_keys: Of the wrapper's state dict.
    """
    return _closer(state_dict, lambda key: _PREFIX + key, own_keys)


def without_wrapper_prefix(state_dict: Any, *, own_keys: Collection[str]) -> Any:
    """Returns `state_dict` without the wrapper's prefix, likewise.

    Args:
        state_dict: Is not changed.
        own_keys: Of the bare module's state dict.
    """
    return _closer(state_dict, lambda key: key.removeprefix(_PREFIX), own_keys)


def _closer(state_dict: Any, rename: Callable[[str], str], own_keys: Collection[str]) -> Any:
    """`state_dict` as it is, or with other names if more of those are among `own_keys`."""
    own = set(own_keys)
    if sum(key in own for key in state_dict) >= sum(rename(key) in own for key in state_dict):
        return state_dict
    result: OrderedDict[str, Any] = OrderedDict((rename(key), value) for key, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        # Keys name modules, without a dot at their end: "" the outermost one, "bn" a child of it.
        result._metadata = OrderedDict(  # type: ignore[attr-defined]
            (rename(f"{key}.").rstrip("."), value) for key, value in metadata.items()
        )
    return result

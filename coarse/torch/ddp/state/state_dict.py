"""State dicts with and without the prefix "module." that wrapping adds.

A module may itself have a child named "module". So the number of matching keys with and without the prefix decides
which kind a state dict is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

_PREFIX = "module."


def with_wrapper_prefix(state_dict: Any, *, own_keys: Collection[str]) -> Any:
    """Returns `state_dict` with the wrapper's prefix; it may come from a wrapper or from a bare module.

    Args:
        state_dict: Not changed.
        own_keys: Keys of the wrapper's state dict.
    """
    return _closer(state_dict, lambda key: _PREFIX + key, own_keys)


def without_wrapper_prefix(state_dict: Any, *, own_keys: Collection[str]) -> Any:
    """Returns `state_dict` without the wrapper's prefix; it may come from a wrapper or from a bare module.

    Args:
        state_dict: Not changed.
        own_keys: Keys of the bare module's state dict.
    """
    return _closer(state_dict, lambda key: key.removeprefix(_PREFIX), own_keys)


def _closer(state_dict: Any, rename: Callable[[str], str], own_keys: Collection[str]) -> Any:
    """`state_dict` unchanged, or with renamed keys if more of these are among `own_keys`."""
    own = set(own_keys)
    if sum(key in own for key in state_dict) >= sum(rename(key) in own for key in state_dict):
        return state_dict
    result: OrderedDict[str, Any] = OrderedDict((rename(key), value) for key, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        # Keys are module names without a trailing dot: "" is the outermost module, "bn" one of its children.
        result._metadata = OrderedDict(  # type: ignore[attr-defined]
            (rename(f"{key}.").rstrip("."), value) for key, value in metadata.items()
        )
    return result

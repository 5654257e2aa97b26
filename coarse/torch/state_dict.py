"""State dicts with and without the prefix "module." that wrapping adds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

_PREFIX = "module."


def with_wrapper_prefix(state_dict: Any, *, own_keys: Collection[str]) -> Any:
    """Returns `state_dict` with the wrapper's prefix, whether it was saved from a wrapper or from a bare
    module.

    Which one it is follows from how many of the wrapper's `own_keys` it holds either way, because a module
    may itself have a child of the name "module". The given dict is not changed.
    """
    own = set(own_keys)
    as_given = sum(key in own for key in state_dict)
    prefixed = sum(_PREFIX + key in own for key in state_dict)
    if as_given >= prefixed:
        return state_dict
    result: OrderedDict[str, Any] = OrderedDict((_PREFIX + key, value) for key, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        # Keys name modules: "" the bare module itself, "bn" a child of it.
        result._metadata = OrderedDict(  # type: ignore[attr-defined]
            ((_PREFIX + key).rstrip("."), value) for key, value in metadata.items()
        )
    return result

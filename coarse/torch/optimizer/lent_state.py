"""A copy, in torch's mapping type, of an optimizer's state in the memory devices; changes to it take effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch

_Print = dict[int, dict[str, tuple[int, int]]]


class LentState:
    """A copy of all state that detects changes.

    Args:
        held: State by parameter and name, as in torch's optimizer.
        known: The names that memory devices can store.
    """

    def __init__(self, held: Mapping[torch.nn.Parameter, dict[str, Any]], known: Collection[str]) -> None:
        self.mapping: defaultdict[torch.nn.Parameter, dict[str, Any]] = defaultdict(dict, held)
        """As `torch.optim.Optimizer.state`: {} for a parameter without state."""
        self._known = frozenset(known)
        self._as_lent = dict(held)  # keeps replaced tensors alive, so that no new tensor gets the same id()
        self._print = _print_of(held)

    def is_changed(self) -> bool:
        """Whether an entry was added, removed, replaced or written to since construction.

        Raises:
            RuntimeError: If there is an entry that the memory devices cannot store.
        """
        unknown = {name for state in self.mapping.values() for name in state} - self._known
        if unknown:
            raise RuntimeError(
                f"optimizer.state has {', '.join(sorted(map(repr, unknown)))}, which the memory devices cannot keep: "
                f"they run this optimizer, and have {', '.join(sorted(self._known))}. Keep it in a separate "
                "dictionary, or use the optimizer without DistributedOptimizer"
            )
        return _print_of(self.mapping) != self._print


def _print_of(state: Mapping[torch.nn.Parameter, Mapping[str, Any]]) -> _Print:
    """A fingerprint of the values: their identities, and for tensors also their numbers of writes."""
    return {
        id(parameter): {name: (id(value), _version_of(value)) for name, value in values.items()}
        for parameter, values in state.items()
        if values
    }


def _version_of(value: Any) -> int:
    return int(value._version) if isinstance(value, torch.Tensor) else 0

"""The state of an optimizer in the memory devices, lent as torch's own mapping: what is done to it counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch

_Print = dict[int, dict[str, tuple[int, int]]]


class LentState:
    """A copy of all state, in which changes are noticed.

    Args:
        held: By parameter and name, as torch's optimizer would have it.
        known: The names that memory devices can keep.
    """

    def __init__(self, held: Mapping[torch.nn.Parameter, dict[str, Any]], known: Collection[str]) -> None:
        self.mapping: defaultdict[torch.nn.Parameter, dict[str, Any]] = defaultdict(dict, held)
        """As `torch.optim.Optimizer.state`: {} for a parameter that has none."""
        self._known = frozenset(known)
        self._as_lent = dict(held)  # keeps tensors, so that no other gets the number of one that was replaced
        self._print = _print_of(held)

    def is_changed(self) -> bool:
        """Whether something was put in, taken out, replaced or written to since then.

        Raises:
            RuntimeError: If there is something that the memory devices cannot keep.
        """
        unknown = {name for state in self.mapping.values() for name in state} - self._known
        if unknown:
            raise RuntimeError(
                f"optimizer.state has {', '.join(sorted(map(repr, unknown)))}, which the memory devices cannot keep: "
                f"they run this optimizer, and have {', '.join(sorted(self._known))}. Keep it in a dictionary of "
                "your own, or use the optimizer without DistributedOptimizer"
            )
        return _print_of(self.mapping) != self._print


def _print_of(state: Mapping[torch.nn.Parameter, Mapping[str, Any]]) -> _Print:
    """Tells values apart by their identity, and tensors also by how often they were written to."""
    return {
        id(parameter): {name: (id(value), _version_of(value)) for name, value in values.items()}
        for parameter, values in state.items()
        if values
    }


def _version_of(value: Any) -> int:
    return int(value._version) if isinstance(value, torch.Tensor) else 0

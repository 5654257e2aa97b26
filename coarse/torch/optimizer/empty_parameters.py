"""Parameters without elements, for which torch's optimizers still keep state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from coarse.torch.optimizer.update_rules import UpdateRule


class EmptyParameters:
    """The state of an optimizer's parameters without elements; memory devices store nothing for them.

    Args:
        parameters: The optimizer's parameters, in its order; those with elements are ignored.
        rule: The optimizer's update rule.
        kept_names: Names of the float32 tensors in the state of each parameter.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], rule: UpdateRule, kept_names: Sequence[Sequence[str]]
    ) -> None:
        with_names = [
            (parameter, tuple(names))
            for parameter, names in zip(parameters, kept_names, strict=True)
            if not parameter.numel()
        ]
        self._parameters = [parameter for parameter, _ in with_names]
        self._kept_names = [names for _, names in with_names]
        self._rule = rule
        self._num_updates = np.zeros(len(self._parameters), dtype=np.int64)

    def update(self) -> None:
        """Counts an update of the parameters that have a gradient."""
        for index, parameter in enumerate(self._parameters):
            self._num_updates[index] += parameter.grad is not None

    def drop_gradients(self) -> None:
        """Removes their gradients, as backward does for all other parameters that it has updated."""
        for parameter in self._parameters:
            parameter.grad = None

    def adopt(self, state: Mapping[torch.nn.Parameter, Mapping[str, Any]]) -> None:
        """Takes over the update counts from torch's state."""
        for index, parameter in enumerate(self._parameters):
            self._num_updates[index] = self._rule.num_updates(state.get(parameter, {}))

    def which_have_state(self) -> bytes:
        """A value that changes when a parameter gets its first state."""
        return (self._num_updates > 0).tobytes()

    def state(self) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
        """The state of each parameter as in torch's optimizer: none for parameters that were never updated."""
        for parameter, names, num_updates in zip(
            self._parameters, self._kept_names, self._num_updates.tolist(), strict=True
        ):
            if names and (num_updates or self._rule.has_state_at_once):
                tensors = {
                    name: torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
                    for name in names
                }
                yield parameter, {**self._rule.counted(num_updates), **tensors}

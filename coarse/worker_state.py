"""Objects of a worker whose state is saved with a checkpoint, or handed to another worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

_METHODS = ("state_dict", "load_state_dict")


class WorkerState(Protocol):
    """An object of a worker to save in a checkpoint, such as torch's schedulers, GradScaler and stateful loaders.

    If a different number of workers continues, `load_state_dicts(states)` is called instead if the object has it,
    with the states of all workers that saved.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Returns numbers, strings, bytes, lists, tuples, dictionaries, tensors and arrays."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restores the result of state_dict()."""


def checked(state: Mapping[str, WorkerState] | None) -> dict[str, WorkerState]:
    """Returns the user's `state` argument as a dictionary.

    Raises:
        TypeError: If an object in it has no state to save.
    """
    for name, each in (state or {}).items():
        lacking = [f"{method}()" for method in _METHODS if not callable(getattr(each, method, None))]
        if lacking:
            raise TypeError(
                f"state[{name!r}] is a {type(each).__name__}, which has no {' and no '.join(lacking)}; pass an "
                "object that has both, as schedulers and GradScaler do, or wrap it"
            )
    return dict(state or {})

"""A worker's position in its data: the epoch and the number of batches that it has used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from coarse.torch.checkpoint.worker_state import RandomState

_generators = RandomState()

Batch = TypeVar("Batch")


class DataPosition:
    """The position in any loader from which a restored worker continues, for `Checkpointer(state=...)`.

    Used batches are loaded again and discarded, with the random numbers from the beginning of the epoch. So a loader
    that shuffles returns the remaining batches in their original order. Loaders with a state_dict() do not need it,
    because they can continue by themselves.

    If a different number of workers continues, each skips its share of the samples that all workers had used.

    Example:
        >>> position = DataPosition()
        >>> for epoch in position.epochs(num_epochs):
        ...     for batch in position.batches(loader):
        ...         train(batch)
    """

    def __init__(self) -> None:
        self.epoch = 0
        """The current epoch."""
        self.num_batches = 0
        """Number of batches of the epoch that were used."""
        self._generators: Any = None  # at the beginning of the epoch
        self._is_restored = False

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch from batches()."""
        return {"epoch": self.epoch, "num_batches": self.num_batches, "generators": self._generators}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes batches() continue at the saved position."""
        self.epoch, self.num_batches, self._generators = (
            state[name] for name in ("epoch", "num_batches", "generators")
        )
        self._is_restored = True

    def load_state_dicts(self, states: list[Mapping[str, Any]]) -> None:
        """Makes batches() continue after the samples that all saved workers had used together."""
        self.load_state_dict(states[0])
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.num_batches = sum(state["num_batches"] for state in states) // world_size

    def epochs(self, count: int) -> Iterator[int]:
        """Iterates over the unfinished epochs of `count` epochs."""
        for epoch in range(self.epoch, count):
            if epoch != self.epoch:
                self.epoch, self.num_batches, self._generators = epoch, 0, None
            yield epoch

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterates over the unused batches of this epoch."""
        was_restored, self._is_restored = self._is_restored, False
        now = _generators.state_dict()
        if not was_restored:
            self.num_batches = 0
            self._generators = now
        elif self._generators is not None:
            _generators.load_state_dict(self._generators)
        iterator = iter(loader)
        for _ in range(self.num_batches if was_restored else 0):
            next(iterator, None)
        if was_restored:
            _generators.load_state_dict(now)
        for batch in iterator:
            self.num_batches += 1
            yield batch

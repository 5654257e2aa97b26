"""Where a worker is in its data: which epoch, and how many batches of it it has used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from coarse.torch.checkpoint.worker_state import RandomState

_generators = RandomState()

Batch = TypeVar("Batch")


class DataPosition:
    """The place in any loader from which a restored worker goes on, for `Checkpointer(state=...)`.

    Batches that were used are loaded again and thrown away, with the random numbers that the epoch began with: so a
    loader that shuffles gives the others, in their order. Loaders that can go on by themselves, because they have a
    state_dict(), need it not.

    Where another number of workers goes on, as many samples are skipped as all together had used.

    Example:
        >>> position = DataPosition()
        >>> for epoch in position.epochs(num_epochs):
        ...     for batch in position.batches(loader):
        ...         train(batch)
    """

    def __init__(self) -> None:
        self.epoch = 0
        """The one that training is in."""
        self.num_batches = 0
        """How many of its batches were used."""
        self._generators: Any = None  # as the epoch began
        self._is_restored = False

    def state_dict(self) -> dict[str, Any]:
        """The place behind the batch that batches() has given last."""
        return {"epoch": self.epoch, "num_batches": self.num_batches, "generators": self._generators}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has batches() go on there."""
        self.epoch, self.num_batches, self._generators = (
            state[name] for name in ("epoch", "num_batches", "generators")
        )
        self._is_restored = True

    def load_state_dicts(self, states: list[Mapping[str, Any]]) -> None:
        """Has batches() go on behind what all workers that there were have used together."""
        self.load_state_dict(states[0])
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.num_batches = sum(state["num_batches"] for state in states) // world_size

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are not finished, of `count`."""
        for epoch in range(self.epoch, count):
            if epoch != self.epoch:
                self.epoch, self.num_batches, self._generators = epoch, 0, None
            yield epoch

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of this epoch that were not used yet."""
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

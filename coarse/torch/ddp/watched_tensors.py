"""Which tensors were written to, or given other memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class WatchedTensors:
    """Tells changes of tensors by torch's version counters and by their addresses.

    What is written to `tensor.data` torch does not count; a tensor that is assigned to `.data` is noticed.

    Args:
        tensors: To watch, from now on.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._seen = [_seen(tensor) for tensor in tensors]

    def note(self, indices: Iterable[int]) -> None:
        """Takes these as they are now for unchanged."""
        for index in indices:
            self._seen[index] = _seen(self._tensors[index])

    def note_all(self) -> None:
        """Takes all as they are now for unchanged."""
        self.note(range(len(self._tensors)))

    def changed(self) -> list[int]:
        """The indices of those that have changed since they were noted."""
        pairs = zip(self._tensors, self._seen, strict=True)
        return [index for index, (tensor, seen) in enumerate(pairs) if _seen(tensor) != seen]


def _seen(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()

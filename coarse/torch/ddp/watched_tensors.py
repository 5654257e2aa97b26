"""Detects tensors that were written to or whose memory was replaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class WatchedTensors:
    """Detects changes of tensors by torch's version counters and by their addresses.

    Writes to `tensor.data` are not detected, because torch does not count them. Assigning a tensor to `.data` is
    detected.

    Args:
        tensors: Tensors to watch from now on.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._seen = [_seen(tensor) for tensor in tensors]

    def note(self, indices: Iterable[int]) -> None:
        """Treats the current contents of these tensors as unchanged."""
        for index in indices:
            self._seen[index] = _seen(self._tensors[index])

    def note_all(self) -> None:
        """Treats the current contents of all tensors as unchanged."""
        self.note(range(len(self._tensors)))

    def changed(self) -> list[int]:
        """The indices of tensors that have changed since they were noted."""
        pairs = zip(self._tensors, self._seen, strict=True)
        return [index for index, (tensor, seen) in enumerate(pairs) if _seen(tensor) != seen]


def _seen(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()

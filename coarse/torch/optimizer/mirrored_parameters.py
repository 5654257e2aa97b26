"""Copies of parameters on a worker's GPU; the optimizer updates the originals in other memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coarse.torch.ddp.watched_tensors import WatchedTensors
from coarse.torch.gradients.layout import copy_all, is_dense


class MirroredParameters:
    """One worker's copies of a model's parameters, which every update refreshes.

    Writes to a copy between two steps, or tensors assigned to its `.data`, are detected and go to the memory devices
    before the next update. The values of the writing worker are used; all workers must write the same values.

    Args:
        parameters: The worker's own parameters; they become copies of `originals` now.
        originals: The same parameters in the memory devices.
        writes: Whether this worker provides the node's values.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], originals: Sequence[torch.Tensor], *, writes: bool
    ) -> None:
        self._parameters = parameters
        self._originals = originals
        self._writes = writes
        for parameter in parameters:
            if not is_dense(parameter.shape, parameter.stride()):  # copied as consecutive bytes
                parameter.data = parameter.detach().contiguous()
        self._layouts = [self._layout_of(parameter) for parameter in parameters]
        self._watched = WatchedTensors(parameters)
        self.pull()

    def pull(self) -> None:
        """Copies all parameters again, with the processor; no update may be running."""
        with torch.no_grad():
            copy_all(self._parameters, self._originals)
        self._watched.note_all()

    def address(self, index: int) -> int:
        """The address to which the GPU copies a parameter.

        Raises:
            RuntimeError: If the parameter has changed since the optimizer moved to the memory devices.
        """
        parameter = self._parameters[index]
        if self._layout_of(parameter) != self._layouts[index]:
            raise RuntimeError(
                f"a parameter was {self._layouts[index]} when its optimizer was given to the memory devices, but is "
                f"{self._layout_of(parameter)} now; convert or move the model before you wrap it"
            )
        return int(parameter.data_ptr())

    def note_update(self, indices: Sequence[int]) -> None:
        """Records that copies have the values of another update, for their next use on the current stream."""
        # They changed in place, so a graph that saved them before must not be run backward any more.
        torch.autograd.graph.increment_version([self._parameters[index] for index in indices])
        self._watched.note(indices)

    def changed(self) -> list[int]:
        """Copies that were written to, or whose memory was replaced, since the last update."""
        changed = self._watched.changed()
        for index in changed:
            self._restore_order(index)
        return changed

    def _restore_order(self, index: int) -> None:
        """Restores a parameter's memory order after a tensor of another order was assigned to it."""
        parameter, (dtype, device, shape, strides) = self._parameters[index], self._layouts[index]
        is_alike = (parameter.dtype, parameter.device, parameter.shape) == (dtype, device, shape)
        if is_alike and parameter.stride() != strides:
            ordered = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            parameter.data = ordered.copy_(parameter.detach())

    def publish(self, indices: Sequence[int]) -> None:
        """Writes these copies to the originals; no update may be running, and snapshots must have the old values."""
        for index in indices:
            if self._writes:
                copy_all([self._originals[index]], [self._parameters[index]])
        self._watched.note(indices)

    @staticmethod
    def _layout_of(
        parameter: torch.nn.Parameter,
    ) -> tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]:
        return parameter.dtype, parameter.device, parameter.shape, parameter.stride()

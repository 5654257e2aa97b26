"""Parameters on a worker's GPU whose originals, which the optimizer updates, lie elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coarse.torch.ddp.watched_tensors import WatchedTensors
from coarse.torch.gradients.layout import copy_all, is_dense


class MirroredParameters:
    """One worker's copies of a model's parameters, which every update brings anew.

    What somebody writes to a copy between two steps, or gives it as its `.data`, is noticed and goes to the memory
    devices before the next update: that of the worker that writes, as all workers write alike.

    Args:
        parameters: The worker's own; they become copies of `originals` now.
        originals: The same parameters in the memory devices.
        writes: Whether this worker's values are those of the node.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], originals: Sequence[torch.Tensor], *, writes: bool
    ) -> None:
        self._parameters = parameters
        self._originals = originals
        self._writes = writes
        for parameter in parameters:
            if not is_dense(parameter.shape, parameter.stride()):  # it is brought as bytes in a row
                parameter.data = parameter.detach().contiguous()
        self._layouts = [self._layout_of(parameter) for parameter in parameters]
        self._watched = WatchedTensors(parameters)
        self.pull()

    def pull(self) -> None:
        """Copies all parameters anew, by the processor; no update is under way."""
        with torch.no_grad():
            copy_all(self._parameters, self._originals)
        self._watched.note_all()

    def address(self, index: int) -> int:
        """Where the GPU is to copy a parameter to.

        Raises:
            RuntimeError: If it is not what it was when the optimizer was given to the memory devices.
        """
        parameter = self._parameters[index]
        if self._layout_of(parameter) != self._layouts[index]:
            raise RuntimeError(
                f"a parameter was {self._layouts[index]} when its optimizer was given to the memory devices, and is "
                f"{self._layout_of(parameter)} now; convert or move the model before it is wrapped"
            )
        return int(parameter.data_ptr())

    def note_update(self, indices: Sequence[int]) -> None:
        """Notes that copies are those of another update, for whoever uses them next on the current stream."""
        # They changed in place: a graph that saved them before must not be run backward any more.
        torch.autograd.graph.increment_version([self._parameters[index] for index in indices])
        self._watched.note(indices)

    def changed(self) -> list[int]:
        """Which copies somebody has written to, or given other memory, since the last update."""
        changed = self._watched.changed()
        for index in changed:
            self._restore_order(index)
        return changed

    def _restore_order(self, index: int) -> None:
        """Gives a parameter that was assigned the values of another order in memory its own order again."""
        parameter, (dtype, device, shape, strides) = self._parameters[index], self._layouts[index]
        is_alike = (parameter.dtype, parameter.device, parameter.shape) == (dtype, device, shape)
        if is_alike and parameter.stride() != strides:
            ordered = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            parameter.data = ordered.copy_(parameter.detach())

    def publish(self, indices: Sequence[int]) -> None:
        """Makes the values of these copies the originals'; no update is under way, and snapshots have the old."""
        for index in indices:
            if self._writes:
                copy_all([self._originals[index]], [self._parameters[index]])
        self._watched.note(indices)

    @staticmethod
    def _layout_of(
        parameter: torch.nn.Parameter,
    ) -> tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]:
        return parameter.dtype, parameter.device, parameter.shape, parameter.stride()

"""Gradients on the same GPU as their slots: `.grad` is the slot, and no data leaves the GPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from coarse.client.tensor_group import TensorGroup, UpdateKind
from coarse.kernels import _native
from coarse.torch.gradients.layout import SlotViews, slot_tensor
from coarse.torch.gradients.paths import gpu_gradients
from coarse.torch.gradients.paths.gpu_gradients import GpuGradients


class GpuSlotGradients(GpuGradients):
    """A GradientPath whose collect() makes the current stream wait, as in the base class; results are in the slots.

    Args:
        group: Its slots are on a GPU and mapped in this worker.
        names: Names of the parameters.
        parameters: In the order of the group, all on that GPU.
        gradient_as_view: Whether `.grad` becomes the slot; otherwise averages are copied back.
        keeps_gradients: False if the slot replaces the gradient and no `.grad` remains.
        waits: As for the base class.
    """

    def __init__(
        self,
        group: TensorGroup,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        *,
        gradient_as_view: bool,
        keeps_gradients: bool,
        waits: bool,
    ) -> None:
        gpu = gpu_gradients.find_gpu(parameters)
        assert gpu is not None
        super().__init__(group, names, parameters, gpu, waits=waits)
        self._slots = [slot_tensor(group.buffer(i), p) for i, p in enumerate(parameters)]
        self._views = SlotViews(self._slots)
        self._keeps_gradients = keeps_gradients
        self._is_view = gradient_as_view and keeps_gradients
        self._sent: list[int] = []

    def can_write_in_place(self, index: int) -> bool:
        return self._is_view or not self._keeps_gradients

    def slot(self, index: int) -> torch.Tensor:
        return self._views[index]

    def send(self, index: int, kind: UpdateKind) -> None:
        gradient = self._parameters[index].grad
        if gradient is None:
            return self.contribute(index, kind, present=False)
        self._copy_to_slot(index, gradient)
        if kind is UpdateKind.UPDATE or not self._keeps_gradients:
            self._parameters[index].grad = None  # the gradient is in the slot now
        elif self._is_view:
            self._parameters[index].grad = self._views[index]
        else:
            self._sent.append(index)
        self._contribute(index, kind, present=True)

    def contribute(self, index: int, kind: UpdateKind, *, present: bool) -> None:
        self._contribute(index, kind, present=present)

    def stage(self, index: int, gradient: torch.Tensor) -> None:
        self._copy_to_slot(index, gradient)

    def _contribute(self, index: int, kind: UpdateKind, *, present: bool) -> None:
        flags = kind | (_native.PRESENT if present else 0)
        brought = self._mirrored(index) if kind & UpdateKind.UPDATE else (0, 0)
        self._add((index, flags, 0, *brought), self._nbytes[index])

    def deliver(self, absent: Collection[int], contributors: Sequence[int]) -> None:
        if not self._keeps_gradients:
            return
        used = [index for index in absent if contributors[index]]
        if self._is_view:
            for index in used:
                self._parameters[index].grad = self._views[index]
            return
        for index in used:
            self._parameters[index].grad = torch.empty_like(self._parameters[index])
        for index in (*self._sent, *used):
            self._parameters[index].grad.detach().copy_(self._slots[index])
        self._sent.clear()

    def _copy_to_slot(self, index: int, gradient: torch.Tensor) -> None:
        """Copies on the current stream."""
        if not self._views.hold(index, gradient):
            self._layout.check(index, gradient)
            self._slots[index].copy_(gradient.detach())

"""Gradients that are not all on one GPU, such as those in host memory: the processor writes and reads the slots."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence

import torch

from coarse.client.tensor_group import TensorGroup, UpdateKind
from coarse.torch.gradients.layout import SlotViews, slot_tensor
from coarse.torch.gradients.paths.gradient_path import GradientLayout
from coarse.torch.optimizer.mirrored_parameters import MirroredParameters


class HostGradients:
    """A GradientPath whose collect() returns when results are in the slots; `.grad` may be views of slots.

    Args:
        group: Has a slot for each parameter.
        names: Names of the parameters.
        parameters: In the order of the group.
        gradient_as_view: Whether `.grad` becomes the slot; otherwise averages are copied back. Gradients outside host
            memory are always copied.
        keeps_gradients: False if the slot replaces the gradient and no `.grad` remains.
        sparse: Parameters without a slot; only contribute() handles them.
    """

    def __init__(
        self,
        group: TensorGroup,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        *,
        gradient_as_view: bool,
        keeps_gradients: bool,
        sparse: Container[int] = (),
    ) -> None:
        self._group = group
        self._parameters = parameters
        self._layout = GradientLayout(names, parameters)
        self._dense = [index for index in range(len(parameters)) if index not in sparse]
        self._slots = [
            torch.empty(0, dtype=p.dtype, device="cpu") if i in sparse else slot_tensor(group.buffer(i), p)
            for i, p in enumerate(parameters)
        ]
        self._addresses = [slot.data_ptr() for slot in self._slots]
        self._is_contiguous = [slot.is_contiguous() for slot in self._slots]
        self._views = SlotViews(self._slots)
        self._keeps_gradients = keeps_gradients
        self._is_view = [
            gradient_as_view and keeps_gradients and p.is_cpu and i not in sparse
            for i, p in enumerate(parameters)
        ]

    def can_write_in_place(self, index: int) -> bool:
        return self._is_view[index] or not self._keeps_gradients

    def slot(self, index: int) -> torch.Tensor:
        return self._views[index]

    def send(self, index: int, kind: UpdateKind) -> None:
        gradient = self._parameters[index].grad
        if gradient is None:
            return self.contribute(index, kind, present=False)
        self._group.push(index, source=self._source(index, gradient), update=kind)
        if not self._keeps_gradients:
            self._parameters[index].grad = None  # the gradient is in the slot now
        elif self._is_view[index] and gradient is not (view := self._views[index]):
            self._parameters[index].grad = view

    def _source(self, index: int, gradient: torch.Tensor) -> int:
        """Copies a gradient to its slot, or returns the address from which push() can; 0 if it is there."""
        if gradient is self._views.last[index] and gradient.data_ptr() == self._addresses[index]:
            return 0
        slot = self._slots[index]
        if (
            gradient.layout is torch.strided
            and gradient.is_cpu
            and gradient.dtype is slot.dtype
            and gradient.numel() == slot.numel()
            # Runs for every gradient of a step; most need no tuple of strides.
            and (
                gradient.is_contiguous() if self._is_contiguous[index] else gradient.stride() == slot.stride()
            )
            and not gradient.requires_grad
            and not (gradient.is_neg() or gradient.is_conj())
        ):
            address = int(gradient.data_ptr())
            # The native code copies before push() returns.
            return 0 if address == self._addresses[index] else address
        self._copy_to_slot(index, gradient)
        return 0

    def _copy_to_slot(self, index: int, gradient: torch.Tensor) -> None:
        self._layout.check(index, gradient)
        self._slots[index].copy_(gradient.detach())

    def contribute(self, index: int, kind: UpdateKind, *, present: bool) -> None:
        self._group.push(index, present=present, update=kind)

    def flush(self) -> None:
        self._group.flush()

    def is_late(self, index: int) -> bool:
        return self._group.is_late(index)

    def stage(self, index: int, gradient: torch.Tensor) -> None:
        if self._source(index, gradient):
            self._copy_to_slot(index, gradient)

    def finish_staging(self) -> None:
        pass  # stage() has waited

    def mirror(self, parameters: MirroredParameters) -> bool:
        return False

    def collect(self, *, counts: bool) -> Sequence[int]:
        return self._group.pull_all()

    def deliver(self, absent: Collection[int], contributors: Sequence[int]) -> None:
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index in self._dense:
            parameter = self._parameters[index]
            if index not in absent:
                if self._is_view[index]:
                    continue
            elif not contributors[index]:
                continue
            elif self._is_view[index]:
                parameter.grad = self._views[index]
                continue
            else:
                parameter.grad = torch.empty_like(parameter)
            destinations.append(parameter.grad.detach())
            sources.append(self._slots[index])
        if destinations:
            torch._foreach_copy_(destinations, sources)

    def synchronize(self) -> None:
        pass  # collect() has waited

    def check(self) -> None:
        pass  # every call reports errors at once

    def confirm(self) -> None:
        pass  # collect() has waited

"""Gradients that are transferred in a narrower type than backward's."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from coarse.client.tensor_group import UpdateKind
from coarse.torch.gradients.layout import contiguous_strides, is_dense
from coarse.torch.gradients.paths.gradient_path import GradientLayout, GradientPath
from coarse.torch.optimizer.mirrored_parameters import MirroredParameters


def stand_ins(
    parameters: Sequence[torch.nn.Parameter],
    dtype: torch.dtype,
    sparse_parameters: Collection[torch.nn.Parameter],
) -> list[torch.nn.Parameter]:
    """Placeholders for `parameters` in a GradientPath: tensors of the same layout and type `dtype`, without memory.

    Complex parameters, `sparse_parameters` and parameters no wider than `dtype` are returned unchanged.
    """
    return [
        p if p.itemsize <= dtype.itemsize or p.is_complex() or p in sparse_parameters else _stand_in(p, dtype)
        for p in parameters
    ]


def _stand_in(parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
    shape, strides = parameter.shape, parameter.stride()
    if not is_dense(shape, strides):
        strides = contiguous_strides(shape)
    empty = torch.empty_strided(shape, strides, dtype=dtype, device=parameter.device)
    empty.untyped_storage().resize_(0)
    return torch.nn.Parameter(empty, requires_grad=False)


class CompressedGradients:
    """A GradientPath that rounds gradients when it sends them, and widens averages when it delivers them.

    Slots, and thus transfers over links and networks, have the narrower type; `.grad` has separate memory.

    Args:
        names: Names of the parameters.
        parameters: The model's parameters.
        narrow: Their stand_ins().
        path: The path for `narrow`.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        narrow: Sequence[torch.nn.Parameter],
        path: GradientPath,
    ) -> None:
        self._layout = GradientLayout(names, parameters)
        self._parameters = parameters
        self._narrow = narrow
        self._path = path

    def can_write_in_place(self, index: int) -> bool:
        return not self._is_rounded(index) and self._path.can_write_in_place(index)

    def slot(self, index: int) -> torch.Tensor:
        return self._path.slot(index)

    def send(self, index: int, kind: UpdateKind) -> None:
        gradient = self._parameters[index].grad
        if gradient is None:
            return self.contribute(index, kind, present=False)
        if not self._is_rounded(index):
            return self._path.send(index, kind)
        self._layout.check(index, gradient)
        is_in_place = self._path.can_write_in_place(index)
        rounded = self._path.slot(index) if is_in_place else torch.empty_like(self._narrow[index])
        rounded.copy_(gradient.detach())
        self._narrow[index].grad = rounded
        self._path.send(index, kind)

    def contribute(self, index: int, kind: UpdateKind, *, present: bool) -> None:
        self._path.contribute(index, kind, present=present)

    def flush(self) -> None:
        self._path.flush()

    def is_late(self, index: int) -> bool:
        return self._path.is_late(index)

    def stage(self, index: int, gradient: torch.Tensor) -> None:
        raise NotImplementedError("an optimizer in the memory devices takes gradients as they are")

    def finish_staging(self) -> None:
        self._path.finish_staging()

    def mirror(self, parameters: MirroredParameters) -> bool:
        return False

    def collect(self, *, counts: bool) -> Sequence[int]:
        return self._path.collect(counts=counts)

    def deliver(self, absent: Collection[int], contributors: Sequence[int]) -> None:
        self._path.deliver(absent, contributors)
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, (parameter, narrow) in enumerate(zip(self._parameters, self._narrow, strict=True)):
            if not self._is_rounded(index) or narrow.grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            destinations.append(parameter.grad.detach())
            sources.append(narrow.grad)
            narrow.grad = None
        if destinations:
            torch._foreach_copy_(destinations, sources)

    def synchronize(self) -> None:
        self._path.synchronize()

    def confirm(self) -> None:
        self._path.confirm()

    def check(self) -> None:
        self._path.check()

    def _is_rounded(self, index: int) -> bool:
        return self._narrow[index] is not self._parameters[index]

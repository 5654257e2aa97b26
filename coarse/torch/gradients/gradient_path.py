"""The way of a model's gradients to their slots, and of averages back to `.grad`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from coarse.client.tensor_group import UpdateKind
from coarse.torch.gradients.layout import contiguous_strides, is_dense
from coarse.torch.optimizer.mirrored_parameters import MirroredParameters


class GradientPath(Protocol):
    """One for the host's memory, one for that of a GPU. One caller at a time."""

    def can_write_in_place(self, index: int) -> bool:
        """Whether backward may write a gradient straight into its slot."""

    def slot(self, index: int) -> torch.Tensor:
        """The slot of a gradient."""

    def send(self, index: int, gradient: torch.Tensor, kind: UpdateKind) -> None:
        """Contributes a gradient, which nobody else changes before deliver()."""

    def take_part(self, index: int, kind: UpdateKind, *, present: bool) -> None:
        """Contributes what is where memory devices read it already, or nothing."""

    def flush(self) -> None:
        """Holds nothing back any more of what was sent."""

    def is_late(self, index: int) -> bool:
        """Whether the result of a gradient that was sent is not there yet."""

    def bring(self, index: int, gradient: torch.Tensor) -> None:
        """Has a gradient copied to its slot, if it is not there."""

    def finish_bringing(self) -> None:
        """Has all gradients that were brought be in their slots before any that is contributed later."""

    def mirror(self, parameters: MirroredParameters) -> bool:
        """Has the results of updates be copied to these; returns False if they are to be pulled instead."""

    def collect(self, *, counts: bool) -> Sequence[int]:
        """Waits for all averages: the processor does, or the current stream.

        Args:
            counts: Whether contributors are asked for, for which the processor has to wait.

        Returns:
            How many workers had each gradient; nothing if not asked for.
        """

    def deliver(self, absent: Collection[int], contributors: Sequence[int]) -> None:
        """Has `.grad` of each parameter that any worker used hold the average.

        Args:
            absent: Gradients that this worker did not have.
            contributors: As collect() returned them; needed if any is absent.
        """

    def settle(self) -> None:
        """Waits until slots are this worker's again, after deliver()."""

    def check(self) -> None:
        """Raises what has gone wrong since the last call; called before a forward."""

    def confirm(self) -> None:
        """Waits until all averages have come, whatever streams do with them; raises why they will not."""


def is_lazy(gradient: torch.Tensor) -> bool:
    """Whether its bytes are those of the other sign, or of complex conjugates."""
    return bool(gradient.is_neg() or gradient.is_conj())


class GradientLayout:
    """What gradients have to be like: those of the parameters when the model was wrapped.

    Args:
        names: Of the parameters.
        parameters: In the order of their slots.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
        self._names = names
        self._shapes = [parameter.shape for parameter in parameters]
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._strides = [
            parameter.stride()
            if is_dense(parameter.shape, parameter.stride())
            else contiguous_strides(parameter.shape)
            for parameter in parameters
        ]
        self._is_contiguous = [parameter.is_contiguous() for parameter in parameters]
        self._num_elements = [parameter.numel() for parameter in parameters]

    def is_plain(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether the bytes of a gradient are those of its slot, one after the other."""
        return (
            gradient.layout is torch.strided
            and gradient.dtype is self._dtypes[index]
            and gradient.numel() == self._num_elements[index]
            # Asked for every gradient of a step; most need no tuple of strides.
            and (
                gradient.is_contiguous()
                if self._is_contiguous[index]
                else gradient.stride() == self._strides[index]
            )
            and not gradient.requires_grad
            and not is_lazy(gradient)  # one that was put in place after backward
        )

    def strides(self, index: int) -> tuple[int, ...]:
        """Of a plain gradient."""
        return tuple(self._strides[index])

    def empty(self, index: int, device: torch.device) -> torch.Tensor:
        """Memory for a plain gradient."""
        return torch.empty_strided(
            self._shapes[index], self._strides[index], dtype=self._dtypes[index], device=device
        )

    def check(self, index: int, gradient: torch.Tensor) -> None:
        """Refuses what cannot be copied to the slot.

        Raises:
            ValueError: Names the parameter and the remedy.
        """
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"parameter {self._names[index]!r}: gradients of layout {gradient.layout} cannot be "
                "averaged, except of nn.Embedding. Make the layer produce dense ones (sparse=False), or list "
                "the parameter in module._ddp_params_and_buffers_to_ignore and average it yourself."
            )
        if gradient.dtype != self._dtypes[index] or gradient.shape != self._shapes[index]:
            raise ValueError(
                f"parameter {self._names[index]!r} was {self._dtypes[index]} {list(self._shapes[index])} when the "
                f"model was wrapped, its gradient is {gradient.dtype} {list(gradient.shape)}. Convert the model "
                "before wrapping it."
            )
        if gradient.requires_grad:
            warnings.warn(
                "backward(create_graph=True) under DistributedDataParallel: gradients are averaged, but not "
                "differentiable through the averaging; second-order gradients stay local.",
                stacklevel=2,
            )

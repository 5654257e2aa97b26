"""The path of a model's gradients to their slots, and of averages back to `.grad`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from coarse.client.tensor_group import UpdateKind
from coarse.torch.gradients.layout import contiguous_strides, is_dense
from coarse.torch.optimizer.mirrored_parameters import MirroredParameters


class GradientPath(Protocol):
    """Implemented for host memory and for GPU memory. One caller at a time."""

    def can_write_in_place(self, index: int) -> bool:
        """Whether backward may write a gradient directly to its slot."""

    def slot(self, index: int) -> torch.Tensor:
        """The slot of a gradient."""

    def send(self, index: int, kind: UpdateKind) -> None:
        """Contributes a parameter's `.grad`, which must not change before deliver(); nothing if it is None."""

    def contribute(self, index: int, kind: UpdateKind, *, present: bool) -> None:
        """Contributes data that memory devices can already read, or nothing if not `present`."""

    def flush(self) -> None:
        """Flushes pending sends."""

    def is_late(self, index: int) -> bool:
        """Whether the result of a sent gradient has not arrived yet."""

    def stage(self, index: int, gradient: torch.Tensor) -> None:
        """Copies a gradient to its slot, if it is not there yet."""

    def finish_staging(self) -> None:
        """Orders all stage() copies before later contributions."""

    def mirror(self, parameters: MirroredParameters) -> bool:
        """Copies the results of updates to `parameters`; returns False if the caller must pull them instead."""

    def collect(self, *, counts: bool) -> Sequence[int]:
        """Waits for all averages, on the processor or on the current stream.

        Args:
            counts: Whether to return contributors, for which the processor must wait.

        Returns:
            Number of workers that had each gradient; empty without `counts`.
        """

    def deliver(self, absent: Collection[int], contributors: Sequence[int]) -> None:
        """Sets `.grad` of each parameter that any worker used to the average.

        Args:
            absent: Gradients that this worker did not have.
            contributors: Result of collect(); needed if a gradient is absent.
        """

    def synchronize(self) -> None:
        """Waits until this worker may use the slots again, after deliver()."""

    def check(self) -> None:
        """Raises errors since the last call; called before a forward."""

    def confirm(self) -> None:
        """Waits on the processor until all averages have arrived; raises the error if they will not."""


class GradientLayout:
    """The required layout of gradients: that of the parameters when the model was wrapped.

    Args:
        names: Names of the parameters.
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
        """Whether a gradient has the memory layout of its slot."""
        return (
            gradient.layout is torch.strided
            and gradient.dtype is self._dtypes[index]
            and gradient.numel() == self._num_elements[index]
            # Runs for every gradient of a step; most need no tuple of strides.
            and (
                gradient.is_contiguous()
                if self._is_contiguous[index]
                else gradient.stride() == self._strides[index]
            )
            and not gradient.requires_grad
            and not (gradient.is_neg() or gradient.is_conj())  # may be assigned after backward
        )

    def strides(self, index: int) -> tuple[int, ...]:
        """Strides of a plain gradient."""
        return tuple(self._strides[index])

    def empty(self, index: int, device: torch.device) -> torch.Tensor:
        """Memory for a plain gradient."""
        return torch.empty_strided(
            self._shapes[index], self._strides[index], dtype=self._dtypes[index], device=device
        )

    def check(self, index: int, gradient: torch.Tensor) -> None:
        """Refuses gradients that cannot be copied to the slot.

        Raises:
            ValueError: Names the parameter and the remedy.
        """
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"parameter {self._names[index]!r}: gradients of layout {gradient.layout} cannot be "
                "averaged, except those of nn.Embedding. Make the layer produce dense ones (sparse=False), or list "
                "the parameter in module._ddp_params_and_buffers_to_ignore and average it yourself."
            )
        if gradient.dtype != self._dtypes[index] or gradient.shape != self._shapes[index]:
            raise ValueError(
                f"parameter {self._names[index]!r} was {self._dtypes[index]} {list(self._shapes[index])} when the "
                f"model was wrapped, but its gradient is {gradient.dtype} {list(gradient.shape)}. Convert the model "
                "before wrapping it."
            )
        if gradient.requires_grad:
            warnings.warn(
                "backward(create_graph=True) under DistributedDataParallel: gradients are averaged, but not "
                "differentiable through the averaging; second-order gradients stay local.",
                stacklevel=2,
            )

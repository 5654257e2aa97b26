"""Measures averaged gradients on the worker if memory devices did not, and detects changes of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from coarse.client.tensor_group import EVERYBODY
from coarse.torch.gradients.gradient_policy import MeasuredGradient


def measure_gradient(name: str, gradient: torch.Tensor) -> MeasuredGradient:
    """Measures an averaged gradient on this worker, in float64; the worker that caused NaN or Inf is then unknown."""
    elements = _elements(gradient.coalesce() if gradient.is_sparse else gradient).detach()
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj())
    squares = float(torch.linalg.vector_norm(elements, dtype=torch.float64)) ** 2
    return MeasuredGradient(
        name=name,
        sum_of_squares=squares,
        first_nonfinite=None if math.isfinite(squares) else EVERYBODY,
    )


def fingerprints(
    gradients: Sequence[torch.Tensor | None], num_changes: int = 0
) -> list[tuple[int, int] | None]:
    """Identities and in-place change counts of the tensors, without the last `num_changes` changes."""
    return [
        None if g is None else (_elements(g).data_ptr(), _elements(g)._version - num_changes)
        for g in gradients
    ]


@cache
def changes_by_scaler(device: torch.device) -> int:
    """Number of changes that torch counts for a gradient when GradScaler searches it for Inf."""
    gradient, found, scale = (torch.ones(1, device=device) for _ in range(3))
    before = gradient._version
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, scale)
    return int(gradient._version - before)


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    """The stored elements: all, or the rows of a sparse gradient."""
    return gradient._values() if gradient.is_sparse else gradient

"""Measures averaged gradients on the worker, where memory devices did not, and tells when these were changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from coarse.client.tensor_group import EVERYBODY
from coarse.torch.gradients.gradient_policy import MeasuredGradient


def measure_gradient(name: str, gradient: torch.Tensor) -> MeasuredGradient:
    """Measures an averaged gradient on this worker, in float64; nobody knows then who made it infinite."""
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
    """Which tensors they are, and how often each was changed in place, not counting the last `num_changes`."""
    return [
        None if g is None else (_elements(g).data_ptr(), _elements(g)._version - num_changes)
        for g in gradients
    ]


@cache
def changes_by_scaler(device: torch.device) -> int:
    """How often torch counts a gradient as changed when GradScaler looks for Inf in it."""
    gradient, found, scale = (torch.ones(1, device=device) for _ in range(3))
    before = gradient._version
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, scale)
    return int(gradient._version - before)


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    """Those that are stored: all, or of a sparse gradient its rows."""
    return gradient._values() if gradient.is_sparse else gradient

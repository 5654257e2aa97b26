"""Counts rows of batches as samples in the session's metrics, for trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from coarse.torch.ddp.outputs import find_tensors
from coarse.torch.session import metrics_of_default_group


def count_batch(batch: object) -> None:
    """Counts a batch on which this worker trains; nothing in a job of one worker."""
    metrics_of_default_group().add("coarse_samples_total", num_rows(batch))


def count_forwards(model: torch.nn.Module) -> None:
    """Counts the arguments of each forward in training mode with gradients, for loops that the user writes."""
    model.register_forward_pre_hook(_count_arguments, with_kwargs=True)


def num_rows(batch: object) -> int:
    """The first dimension of a batch's first tensor that has one; 0 without such a tensor."""
    tensors = find_tensors(dict(batch) if isinstance(batch, Mapping) else batch)
    return next((len(tensor) for tensor in tensors if tensor.dim()), 0)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _count_arguments(model: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    if model.training and torch.is_grad_enabled():
        count_batch((arguments, keywords))

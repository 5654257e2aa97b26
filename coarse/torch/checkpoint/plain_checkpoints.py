"""Loads checkpoints written by torch.save or safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coarse.errors import CheckpointError
from coarse.torch.checkpoint.training_state import bare
from coarse.torch.ddp.state.state_dict import without_wrapper_prefix


def load_state_dicts(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    model_key: str = "model",
    optimizer_key: str = "optimizer",
) -> None:
    """Loads a plain PyTorch checkpoint: a state dict, or a dictionary of them, saved by torch.save or safetensors.

    Works before and after wrapping. If the optimizer runs in the memory devices, every worker must load the same
    file.

    Args:
        path: File of torch.save (read with weights_only=True, which runs no code), or `*.safetensors`.
        model: Model to load into, strictly.
        optimizer: Optimizer to load into; None to load only the model.
        model_key: Key of the model's state dict in a dictionary of state dicts; unused for a bare state dict.
        optimizer_key: Key of the optimizer's state dict.

    Raises:
        CheckpointError: If the file lacks a requested state dict.
        RuntimeError: As torch's load_state_dict(), if tensors are missing, unexpected or of another shape.
    """
    saved = _read_plain(Path(path))
    state_dict = saved.get(model_key, saved)
    module = bare(model)
    module.load_state_dict(without_wrapper_prefix(state_dict, own_keys=module.state_dict()))
    if optimizer is not None:
        if optimizer_key not in saved:
            raise CheckpointError(
                f"{path} has no {optimizer_key!r}; it has {', '.join(map(str, list(saved)[:20]))}. Name the "
                "optimizer's state dict with optimizer_key, or load the model alone."
            )
        optimizer.load_state_dict(saved[optimizer_key])


def _read_plain(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise CheckpointError(f"{path} needs the package safetensors: pip install safetensors") from None
        loaded: Mapping[str, Any] = load_file(path)
        return loaded
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{path} contains a {type(saved).__name__}, not a state dict")
    return saved

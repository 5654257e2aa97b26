"""Exports checkpoints to PyTorch's formats: for torch.load and for torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from coarse.checkpoint.reader import Checkpoint, Progress
from coarse.checkpoint.source import MODEL_PREFIX, OPTIMIZER_PREFIX, SavedTensor
from coarse.checkpoint.values import from_json
from coarse.errors import CheckpointError
from coarse.torch.checkpoint.training_state import empty_tensor, from_small_tensor, load_tensors


def export_torch(checkpoint: Checkpoint, path: Path, progress: Progress = lambda done, total: None) -> None:
    """Writes one file for torch.load(weights_only=True): a dictionary of `model`, `optimizer` and `step`.

    The optimizer's state dict numbers parameters as torch does, in the order of its groups. So the same optimizer of
    the same model can load it.

    Raises:
        CheckpointError: If the file exists, or the checkpoint is damaged.
    """
    with _whole(path) as unfinished:
        state = state_dicts(checkpoint, progress)
        if "optimizer" in state:
            state["optimizer"] = _numbered(state["optimizer"])
        torch.save(state, unfinished)


def export_dcp(checkpoint: Checkpoint, path: Path, progress: Progress = lambda done, total: None) -> None:
    """Writes a folder for torch.distributed.checkpoint: `model`, `optimizer` and `step`, parameters by their names.

    torch.distributed.checkpoint.state_dict.get_state_dict() has the same content for this model and optimizer.

    Raises:
        CheckpointError: If the folder exists, or the checkpoint is damaged.
    """
    with _whole(path) as unfinished, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist requests this
        dcp.save(state_dicts(checkpoint, progress), checkpoint_id=unfinished, no_dist=True)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path for a new file or folder, which moves to `path` once all of it is on the disk."""
    if path.exists():
        raise CheckpointError(f"{path} already exists, and is not overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    _remove(unfinished)  # left by a killed export
    try:
        yield unfinished
        for each in (*unfinished.rglob("*"), unfinished):
            _flush(each)
        unfinished.rename(path)
        _flush(path.parent)
    except BaseException:
        _remove(unfinished)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def state_dicts(checkpoint: Checkpoint, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Loads a whole checkpoint into memory: `model`, `optimizer` if it has one (parameters by name), and `step`.

    Raises:
        CheckpointError: If the checkpoint is damaged.
    """
    tensors = {tensor: empty_tensor(tensor) for tensor in checkpoint.tensors}
    load_tensors(checkpoint, tensors, progress)
    found: dict[str, Any] = {"model": _model(tensors), "step": checkpoint.step}
    if checkpoint.manifest.optimizer is not None:
        settings = from_json(checkpoint.manifest.optimizer, translate=from_small_tensor)
        found["optimizer"] = {
            "state": _optimizer_state(tensors, settings["values"]),
            "param_groups": settings["param_groups"],
        }
    return found


def _model(tensors: dict[SavedTensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        tensor.name.removeprefix(MODEL_PREFIX): memory
        for tensor, memory in tensors.items()
        if tensor.name.startswith(MODEL_PREFIX)
    }


def _optimizer_state(
    tensors: dict[SavedTensor, torch.Tensor], values: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {parameter: dict(own) for parameter, own in values.items()}
    for tensor, memory in tensors.items():
        if tensor.name.startswith(OPTIMIZER_PREFIX):
            name, _, parameter = tensor.name.removeprefix(OPTIMIZER_PREFIX).partition(".")
            state.setdefault(parameter, {})[name] = memory
    return state


def _numbered(named: dict[str, Any]) -> dict[str, Any]:
    names = [name for group in named["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "state": {numbers[name]: state for name, state in named["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in named["param_groups"]
        ],
    }

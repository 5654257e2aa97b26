"""Small states whose bytes are functions of step and name, and folders for saving them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coarse.checkpoint.folder import Folder
from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.reader import Checkpoint
from coarse.checkpoint.saver import Saver, SourceWriting, WorkerState
from coarse.checkpoint.source import ArraySource, CheckpointSource, SavedTensor
from coarse.checkpoint.writer import SaveDetails, WriteOptions, write_checkpoint

TENSORS = (
    SavedTensor(name="model.weight", dtype="F32", shape=(7, 5)),
    SavedTensor(name="model.halves", dtype="BF16", shape=(3,)),
    SavedTensor(name="model.count", dtype="I64", shape=()),
    SavedTensor(name="model.mask", dtype="BOOL", shape=(5,)),
    SavedTensor(name="model.nothing", dtype="F32", shape=(0, 4)),
    SavedTensor(name="optimizer.exp_avg.weight", dtype="F32", shape=(7, 5)),
    SavedTensor(name="optimizer.step.weight", dtype="F32", shape=()),
)

# Small limits, so that these states have several files, and their tensors several chunks.
OPTIONS = WriteOptions(file_bytes=256, chunk_bytes=64, flush_bytes=128, state_timeout_s=20.0)


def content(tensor: SavedTensor, step: int) -> bytes:
    """Bytes of a tensor at a step."""
    seed = int.from_bytes(hashlib.sha256(f"{tensor.name} {step}".encode()).digest()[:8], "little")
    data = np.random.default_rng(seed).integers(0, 256, tensor.nbytes, dtype=np.uint8)
    return (data & 1 if tensor.dtype == "BOOL" else data).tobytes()


def source(step: int) -> ArraySource:
    """The state of a step."""
    return ArraySource(step, {t: np.frombuffer(content(t, step), dtype=np.uint8) for t in TENSORS})


def save(
    path: Path,
    *steps: int,
    observe: Callable[[str, str], None] | None = None,
    details: SaveDetails | None = None,
) -> CheckpointName:
    """Saves the states of some steps; returns the name of the last one."""
    with Folder.open(path, create=True, observe=observe) as parent:
        names = [
            write_checkpoint(parent, source(step), details or SaveDetails(), options=OPTIONS)
            for step in steps
        ]
    return names[-1]


def begin(
    saver: Saver,
    state: CheckpointSource,
    details: SaveDetails | None = None,
    own_state: Any = None,
    options: WriteOptions = OPTIONS,
) -> bool:
    """Begins to save a state; `own_state` is the own state of worker 0."""
    details = details or SaveDetails()
    own = WorkerState(step=state.step, save_number=details.save_number, rank=0, state=own_state)
    writing = SourceWriting(saver.folder, state, details, options)
    return saver.start(writing, own if details.has_worker_state else None)


def check_contents(checkpoint: Checkpoint) -> None:
    """Checks that the checkpoint contains every tensor, with the bytes of its step.

    Raises:
        AssertionError: If a tensor is missing or differs.
    """
    assert set(checkpoint.tensors) == set(TENSORS)
    for tensor in checkpoint.tensors:
        assert b"".join(map(bytes, checkpoint.read(tensor))) == content(tensor, checkpoint.step)

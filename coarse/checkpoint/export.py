"""Exports a checkpoint's model as one plain safetensors file, readable without COARSE."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from coarse.checkpoint.folder import Folder
from coarse.checkpoint.reader import Checkpoint, Progress
from coarse.checkpoint.source import DTYPE_BYTES, MODEL_PREFIX
from coarse.checkpoint.tensor_file import header_of
from coarse.errors import CheckpointError


def export_safetensors(
    checkpoint: Checkpoint, path: Path, progress: Progress = lambda done, total: None
) -> None:
    """Writes the model's state dict: parameters and buffers under the bare module's own names.

    Needs one chunk of memory.

    Args:
        checkpoint: The checkpoint to export.
        path: The new file.
        progress: Receives the written and the total number of bytes.

    Raises:
        CheckpointError: If the file already exists, or the checkpoint is damaged. Leaves no incomplete file.
        OSError: If the disk write fails.
    """
    tensors = [tensor for tensor in checkpoint.tensors if tensor.name.startswith(MODEL_PREFIX)]
    tensors.sort(key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    renamed = [replace(tensor, name=tensor.name.removeprefix(MODEL_PREFIX)) for tensor in tensors]
    done, total = 0, sum(tensor.nbytes for tensor in tensors)
    with Folder.open(path.parent, create=True) as folder:
        if folder.has(path.name):
            raise CheckpointError(f"{path} already exists and is not overwritten")
        unfinished = f"{path.name}.tmp"
        folder.remove(unfinished)
        try:
            with folder.writing(unfinished) as file:
                file.write(header_of(renamed, {"format": "pt", "step": str(checkpoint.step)}))
                for tensor in tensors:
                    for piece in checkpoint.read(tensor):
                        file.write(piece)
                        done += len(piece)
                        progress(done, total)
            folder.rename(unfinished, path.name)
        except BaseException:
            folder.remove(unfinished)
            raise

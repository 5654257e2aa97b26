"""Checkpoints of a training loop, saved in the background and restored on any number of workers."""

from coarse.torch.checkpoint.checkpointer import (
    Checkpointer,
    DataPosition,
    RandomState,
    WorkerState,
    load_state_dicts,
)

__all__ = ["Checkpointer", "DataPosition", "RandomState", "WorkerState", "load_state_dicts"]

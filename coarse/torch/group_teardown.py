"""Torch's process groups where their destructors would hang: in forks, and where other workers are lost or silent."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch.distributed as dist


@functools.cache
def keep_process_groups_in_forks() -> None:
    """From now on a fork of this process that ends by sys.exit() ends. Idempotent.

    The destructors of torch's groups and stores wait for threads, which a fork does not have. So a fork holds on to
    each group, and with it to its store, to the very end.
    """
    os.register_at_fork(after_in_child=hold_process_groups)


def hold_process_groups() -> None:
    """Has the destructors of all groups of this process never run."""
    for group in list(dist.distributed_c10d._world.pg_map):
        hold_process_group(group)


def hold_process_group(group: Any) -> None:
    """Has the destructor of a group never run: it waits for collectives that another worker has not joined."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

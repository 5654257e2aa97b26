"""Torch's process groups where their destructors would hang: in forks, and where other workers are lost or silent."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
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


def leave_process_groups(limit_s: float) -> None:
    """Destroys all groups of this process. What waits for other workers longer than `limit_s` waits no more.

    A group's destructor waits for its collectives, for as long as the group's time-out if another worker is stopped.
    So it runs in a thread, which is left behind; that of a group which the script still refers to never runs.
    """
    groups = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
    thread = threading.Thread(target=dist.destroy_process_group, name="coarse-leaving", daemon=True)
    try:
        thread.start()
        thread.join(limit_s)
    except RuntimeError:  # the interpreter starts no threads any more
        pass
    for group in groups:
        if (left := group()) is not None:
            hold_process_group(left)


def hold_process_group(group: Any) -> None:
    """Has the destructor of a group never run: it waits for collectives that another worker has not joined."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

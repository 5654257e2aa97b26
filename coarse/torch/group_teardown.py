"""Prevents hanging destructors of torch's process groups in forks, and if other workers are lost or silent."""

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
    """Lets forks of this process end by sys.exit() from now on without hanging. Idempotent.

    The destructors of torch's groups and stores wait for threads, which a fork does not have. So a fork keeps a
    reference to each group, and thus to its store, until it ends.
    """
    os.register_at_fork(after_in_child=hold_process_groups)


def hold_process_groups() -> None:
    """Prevents the destructors of all groups of this process from ever running."""
    for group in list(dist.distributed_c10d._world.pg_map):
        hold_process_group(group)


def leave_process_groups(limit_s: float) -> None:
    """Destroys all groups of this process; waits at most `limit_s` for other workers.

    A group's destructor waits for its collectives, up to the group's time-out if another worker is stopped. So it
    runs in a thread, which is abandoned after the limit. If the script still refers to a group, its destructor never
    runs.
    """
    groups = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
    thread = threading.Thread(target=dist.destroy_process_group, name="coarse-leaving", daemon=True)
    try:
        thread.start()
        thread.join(limit_s)
    except RuntimeError:  # the interpreter no longer starts threads
        pass
    for group in groups:
        if (left := group()) is not None:
            hold_process_group(left)


def hold_process_group(group: Any) -> None:
    """Prevents a group's destructor from running, because it waits for collectives that others have not joined."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

"""Forks of a worker: its process groups are not theirs, and must not be torn down as a fork ends."""

from __future__ import annotations

import ctypes
import functools
import os

import torch.distributed as dist


@functools.cache
def keep_process_groups_in_forks() -> None:
    """From now on a fork of this process that ends by sys.exit() ends. Idempotent.

    The destructors of torch's groups and stores wait for threads, which a fork does not have. So a fork holds on to
    each group, and with it to its store, to the very end.
    """
    os.register_at_fork(after_in_child=_hold_process_groups)


def _hold_process_groups() -> None:
    for group in list(dist.distributed_c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

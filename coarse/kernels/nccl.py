"""Finds NCCL, which all-reduces between GPUs, in the Python environment or on the system."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from coarse.kernels import _native

_SONAME = "libnccl.so.2"
_WHEEL = "nvidia/nccl/lib"


def find_nccl() -> _native.NcclLibrary:
    """Loads this environment's NCCL, PyTorch's or that of `pip install 'coarse-train[nccl]'`; else the machine's.

    It stays loaded, and needs neither a GPU nor a driver until somebody joins a communicator.

    Raises:
        NcclError: If no NCCL can be loaded; says why for each one that was found, and what to install.
    """
    failures = []
    for path in _candidates():
        try:
            return _native.NcclLibrary(path)
        except _native.NcclError as error:
            failures.append(str(error))
    raise _native.NcclError("; ".join(failures))


def describe(library: _native.NcclLibrary) -> str:
    """Version and place, for people."""
    return f"NCCL {'.'.join(map(str, library.version))} ({library.path})"


def _candidates() -> Iterator[str]:
    for entry in sys.path:
        path = Path(entry) / _WHEEL / _SONAME
        if path.exists():
            yield os.fspath(path)
    yield _SONAME

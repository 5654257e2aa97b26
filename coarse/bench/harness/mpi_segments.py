"""Shared memory files that MPI libraries leave when their processes are killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

_SHARED_MEMORY_ROOT = "/dev/shm/"
# Segments of MPICH and Intel MPI have names until MPI_Finalize, those of Open MPI until its launcher removes them.
_MPI_PREFIXES = ("mpich_shm_", "vader_segment.", "sm_segment.", "Intel_MPI", "ucx_shm_posix")


def mapped_by(pids: Iterable[int]) -> set[Path]:
    """Shared memory files of MPI libraries that the live processes `pids` have mapped."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= _mapped_segments(Path(f"/proc/{pid}/maps").read_text())
    return found


def remove(paths: Iterable[Path]) -> None:
    """Removes files; missing files are ignored."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def _mapped_segments(maps: str) -> set[Path]:
    paths = (line[line.index("/") :] for line in maps.splitlines() if _SHARED_MEMORY_ROOT in line)
    return {
        Path(path)
        for path in paths
        if path.removeprefix(_SHARED_MEMORY_ROOT).startswith(_MPI_PREFIXES) and " (deleted)" not in path
    }

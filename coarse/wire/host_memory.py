"""Host memory as workers and memory devices take it: what is available, and pages of sparse segments."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from coarse.errors import OutOfDeviceMemoryError
from coarse.machine.host import read_cgroup_available_bytes
from coarse.wire.segments import Segment

_MOST_NAME_BYTES = 200  # the kernel takes up to 249
RESERVE_BYTES = 64 << 20
"""Left to the operating system when a device fills the host's memory."""
_RESERVATION_BYTES = 64 << 20  # taken between two looks at what is available, for others may take memory too


def reserve(label: str, segment: Segment, begin: int, end: int) -> None:
    """Takes pages of a segment that was allocated sparsely.

    Args:
        label: What they are for.
        segment: In one piece.
        begin, end: The first byte, and the first one behind them.

    Raises:
        OutOfDeviceMemoryError: If they are not to be had, or not any more when some were taken; these stay taken.
    """
    for at in range(begin, end, _RESERVATION_BYTES):
        available = available_bytes()
        shortage = shortage_of(label, end - at, available)
        if end - at > available:
            raise OutOfDeviceMemoryError(shortage)
        try:
            os.posix_fallocate(segment.fd, at, min(_RESERVATION_BYTES, end - at))
        except OSError as error:
            raise refused(error, label, end - at, shortage) from error


def available_bytes() -> int:
    """Host memory that this process may still take."""
    return within_cgroup(_meminfo_bytes("MemAvailable") - RESERVE_BYTES)


def within_cgroup(num_bytes: int) -> int:
    """So much of `num_bytes` of host memory as this process's control groups allow."""
    allowed = read_cgroup_available_bytes()
    return max(0, num_bytes if allowed is None else min(num_bytes, allowed))


def refused(error: OSError, label: str, num_bytes: int, shortage: str) -> OutOfDeviceMemoryError:
    """What the kernel's refusal of host memory means.

    Args:
        error: The refusal.
        label, num_bytes: What was asked for.
        shortage: What to say if there is too little memory.
    """
    if error.errno == errno.EFBIG:  # for the kernel, shared memory is a file
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return OutOfDeviceMemoryError(
            f"{label} needs {num_bytes / 2**20:.1f} MiB in one piece, and a file of this process, as shared memory "
            f"is one, may have {limit / 2**20:.1f} MiB at most. Raise that limit: `ulimit -f unlimited` in a shell, "
            "LimitFSIZE of a service"
        )
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return OutOfDeviceMemoryError(shortage)
    return OutOfDeviceMemoryError(str(error.strerror))


def shortage_of(label: str, num_bytes: int, available: int) -> str:
    return (
        f"{label} needs {num_bytes / 2**20:.1f} MiB of host memory, {available / 2**20:.1f} MiB are available. "
        "Use fewer workers on this node, a smaller model, or a machine with more memory."
    )


def memory_name(label: str) -> str:
    """What the kernel is told that memory is for. Shown in /proc/PID/maps."""
    return f"coarse-{label}".encode("ascii", "replace")[:_MOST_NAME_BYTES].decode()


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 1 << 62

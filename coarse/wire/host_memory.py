"""Host memory for workers and memory devices: the available amount, and pages of sparse segments."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from coarse.errors import OutOfDeviceMemoryError
from coarse.machine.host import read_cgroup_available_bytes
from coarse.wire.segments import Segment

_MOST_NAME_BYTES = 200  # the kernel's limit is 249
RESERVE_BYTES = 64 << 20
"""Left to the operating system when a device fills the host's memory."""
_RESERVATION_BYTES = 64 << 20  # reserved between two checks of available memory, which others use too


def reserve(label: str, segment: Segment, begin: int, end: int) -> None:
    """Reserves pages of a sparsely allocated segment.

    Args:
        label: Purpose of the pages.
        segment: A segment of one piece.
        begin, end: Start and exclusive end in bytes.

    Raises:
        OutOfDeviceMemoryError: If not all pages are available; pages that were reserved before stay reserved.
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
    """Host memory that this process may still allocate."""
    return within_cgroup(_meminfo_bytes("MemAvailable") - RESERVE_BYTES)


def within_cgroup(num_bytes: int) -> int:
    """The part of `num_bytes` of host memory that this process's control groups allow."""
    allowed = read_cgroup_available_bytes()
    return max(0, num_bytes if allowed is None else min(num_bytes, allowed))


def refused(error: OSError, label: str, num_bytes: int, shortage: str) -> OutOfDeviceMemoryError:
    """The error for the kernel's refusal of host memory.

    Args:
        error: The refusal.
        label, num_bytes: Purpose and size of the requested memory.
        shortage: Message for too little memory.
    """
    if error.errno == errno.EFBIG:  # to the kernel, shared memory is a file
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return OutOfDeviceMemoryError(
            f"{label} needs {num_bytes / 2**20:.1f} MiB in one piece. Shared memory is a file, and a file of "
            f"this process can have at most {limit / 2**20:.1f} MiB. Raise that limit: `ulimit -f unlimited` "
            "in a shell, LimitFSIZE of a service"
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
    """The name of memory for the kernel, which /proc/PID/maps shows."""
    return f"coarse-{label}".encode("ascii", "replace")[:_MOST_NAME_BYTES].decode()


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 1 << 62

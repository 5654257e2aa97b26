"""Device memory emulated in host memory."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from coarse.errors import OutOfDeviceMemoryError
from coarse.kernels import _native
from coarse.machine.host import read_cgroup_available_bytes
from coarse.proxy.memory.segment import Segment

_MOST_NAME_BYTES = 200  # the kernel takes up to 249
RESERVE_BYTES = 64 << 20
"""Left to the operating system when a device fills the host's memory."""
_RESERVATION_BYTES = 64 << 20  # taken between two looks at what is available, for others may take memory too


class HostMemory:
    """Sealed memfds that nobody can find by name."""

    kind = "host"
    name = "host memory"
    is_mappable = True
    takes_pages_later = True
    num_places = 1
    message_bytes = _native.HOST_MESSAGE_BYTES

    def allocate(self, label: str, num_bytes: int) -> Segment:
        available = self.available_bytes()
        if num_bytes > available:
            raise OutOfDeviceMemoryError(_shortage(label, num_bytes, available))
        try:
            return Segment(_native.create_sealed_memory(memory_name(label), num_bytes), num_bytes)
        except OSError as error:
            raise refused(error, label, num_bytes, _shortage(label, num_bytes, available)) from error

    def allocate_host(self, label: str, num_bytes: int) -> Segment:
        return self.allocate(label, num_bytes)

    def allocate_sparse(self, label: str, num_bytes: int) -> Segment:
        try:
            return Segment(_native.create_sparse_sealed_memory(memory_name(label), num_bytes), num_bytes)
        except OSError as error:
            raise refused(
                error, label, num_bytes, _shortage(label, num_bytes, self.available_bytes())
            ) from error

    def reserve(self, label: str, segment: Segment, begin: int, end: int) -> None:
        """Takes pages of a segment that was allocated sparsely.

        Args:
            label: What they are for.
            segment: In one piece.
            begin, end: The first byte, and the first one behind them.

        Raises:
            OutOfDeviceMemoryError: If they are not to be had, or not any more when some were taken; these stay taken.
        """
        for at in range(begin, end, _RESERVATION_BYTES):
            available = self.available_bytes()
            shortage = _shortage(label, end - at, available)
            if end - at > available:
                raise OutOfDeviceMemoryError(shortage)
            try:
                os.posix_fallocate(segment.fd, at, min(_RESERVATION_BYTES, end - at))
            except OSError as error:
                raise refused(error, label, end - at, shortage) from error

    def available_bytes(self) -> int:
        return within_cgroup(_meminfo_bytes("MemAvailable") - RESERVE_BYTES)

    def cores(self) -> tuple[int, ...]:
        return ()

    def tensor_memory(self) -> None:
        return None

    def snapshot_pool(self, plan: _native.GroupPlan) -> None:
        return None

    def close(self) -> None:
        """Has nothing to give up: memory goes with its segments."""


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


def _shortage(label: str, num_bytes: int, available: int) -> str:
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

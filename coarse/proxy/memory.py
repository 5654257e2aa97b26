"""Where a memory device keeps its bytes. Nothing outside this module knows which kind of memory that is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from coarse.errors import OutOfDeviceMemoryError
from coarse.kernels import _native

_MOST_NAME_BYTES = 200
_RESERVE_BYTES = 64 << 20  # left to the operating system when a device fills the host's memory


class Segment:
    """A piece of device memory that can be given to other processes as a file descriptor.

    Its size is fixed and its pages are allocated when it is made. Closing it gives up this process's descriptor;
    the memory is freed when the last process that maps it has let go.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes

    def read_only_fd(self) -> int:
        """A descriptor through which the memory can only be read. The caller closes it."""
        return _native.reopen_read_only(self.fd)

    def close(self) -> None:
        """Gives the descriptor up. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class DeviceMemory(Protocol):
    """The memory of one memory device."""

    kind: str

    def allocate(self, label: str, num_bytes: int) -> Segment:
        """Takes `num_bytes` of zeroed memory.

        Raises:
            OutOfDeviceMemoryError: If it is not there; nothing was taken.
        """

    def allocate_sparse(self, label: str, num_bytes: int) -> Segment:
        """Memory whose pages are taken, and given back, one by one later; nothing is taken now.

        Raises:
            OutOfDeviceMemoryError: If there is no such memory.
        """

    def available_bytes(self) -> int:
        """How much allocate() can still give, at this moment."""


class HostMemory:
    """Device memory emulated in host memory: sealed memfds that nobody can find by name."""

    kind = "host"

    def allocate(self, label: str, num_bytes: int) -> Segment:
        available = self.available_bytes()
        if num_bytes > available:
            raise OutOfDeviceMemoryError(_shortage(label, num_bytes, available))
        try:
            return Segment(_native.create_sealed_memory(_memory_name(label), num_bytes), num_bytes)
        except OSError as error:
            raise OutOfDeviceMemoryError(_shortage(label, num_bytes, available)) from error

    def allocate_sparse(self, label: str, num_bytes: int) -> Segment:
        try:
            return Segment(_native.create_sparse_sealed_memory(_memory_name(label), num_bytes), num_bytes)
        except OSError as error:
            raise OutOfDeviceMemoryError(_shortage(label, num_bytes, self.available_bytes())) from error

    def available_bytes(self) -> int:
        host = _meminfo_bytes("MemAvailable") - _RESERVE_BYTES
        return max(0, min(host, _cgroup_available_bytes()))


def open_memory(kind: str) -> DeviceMemory:
    """The memory of a device of the given kind.

    Raises:
        ValueError: If there is no such kind.
    """
    if kind != HostMemory.kind:
        raise ValueError(f"there is no device memory of kind {kind!r}")
    return HostMemory()


def _shortage(label: str, num_bytes: int, available: int) -> str:
    return (
        f"{label} needs {num_bytes / 2**20:.1f} MiB of host memory, {available / 2**20:.1f} MiB are available. "
        "Use fewer workers on this node, a smaller model, or a machine with more memory."
    )


def _memory_name(label: str) -> str:
    # Shown in /proc/PID/maps; the kernel takes up to 249 bytes.
    return f"coarse-{label}".encode("ascii", "replace")[:_MOST_NAME_BYTES].decode()


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _cgroup_available_bytes() -> int:
    """What the control group still allows; a very large number where there is no limit."""
    root = Path("/sys/fs/cgroup")
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = (root / limit_name).read_text().strip(), (root / usage_name).read_text().strip()
        except OSError:
            continue
        return 1 << 62 if limit == "max" else int(limit) - int(usage)
    return 1 << 62

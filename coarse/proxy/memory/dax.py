"""Device memory on a DAX device: CXL or persistent memory that programs map directly (docs/devices.md)."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coarse.errors import DeviceMemoryBusyError, OutOfDeviceMemoryError
from coarse.kernels import _native
from coarse.machine.host import nearest_cores, read_dax_devices, read_numa_nodes
from coarse.proxy.memory.host import HostMemory
from coarse.wire.segments import Extent, Segment

_ALIGNMENT_BYTES = 2 << 20  # of extents, unless the device requires more
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, process
_PATIENCE_S = 2.0  # a memory device of the previous session may be about to end
_POLL_S = 0.01
_MOST_COMMAND_CHARACTERS = 80
_SYSFS = Path("/sys")
_MOUNTS = Path("/proc/self/mountinfo")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaxGeometry:
    """Properties of a DAX device.

    Args:
        num_bytes: Size of the device.
        alignment_bytes: Mappings start and end at multiples of it.
        node: The NUMA node whose processors are nearest; -1 if unknown.
        is_file: Whether it is a file, which may have holes.
    """

    num_bytes: int
    alignment_bytes: int = _ALIGNMENT_BYTES
    node: int = -1
    is_file: bool = False


class DaxMemory:
    """A DAX device, or a file on a DAX file system, that belongs to one memory device.

    It holds tensors, each segment in its own extent. Control words, old versions for snapshots and copies for workers
    lie in the host's memory, because they need seals, or pages that are allocated and freed at any time.

    The kernel tracks the extents: every segment has its own open file description, which holds a lock on its extent.
    Thus the extent is free when, and only when, the last descriptor and the last mapping of it are gone, in any
    process, however it ended. The whole device is locked as long as the memory device lives.

    Args:
        path: Path of the device or file.

    Raises:
        ValueError: If it is not a DAX device, cannot be opened, is too small or not aligned.
        DeviceMemoryBusyError: If another process uses it; names that process.
    """

    kind = "dax"
    is_mappable = True
    takes_pages_later = False
    num_places = 1
    message_bytes = _native.HOST_MESSAGE_BYTES

    def __init__(self, path: str) -> None:
        self.path = self.name = path
        self._geometry = dax_geometry(path)
        self._host = HostMemory()
        self._fd = _open(path)
        try:
            _lock_whole(self._fd, path)
        except BaseException:
            self.close()
            raise
        if not self._geometry.is_file and not is_kernels_own(path):
            logger.warning(
                "%s was made for this container: memory devices elsewhere do not see that this one has it, and "
                "would overwrite what lies there. Give all containers the host's file: docs/devices.md, dax",
                path,
            )

    def allocate(self, label: str, num_bytes: int) -> Segment:
        unit = self._geometry.alignment_bytes
        extent_bytes = -(-num_bytes // unit) * unit
        fitting = (begin for begin, end in self._gaps() if end - begin >= extent_bytes)
        begin = next(fitting, None)
        if begin is None:
            raise OutOfDeviceMemoryError(self._shortage(label, extent_bytes))
        segment = Segment(_reopen(self._fd), num_bytes, Extent(begin, extent_bytes))
        try:
            _lock_extent(segment.fd, begin, begin + extent_bytes)
            if self._geometry.is_file:
                self._fill_holes(label, segment.fd, begin, extent_bytes)
            mapping = _native.Mapping(segment.region, num_bytes)
            ctypes.memset(mapping.address, 0, num_bytes)
        except BaseException:
            segment.close()
            raise
        return segment

    def allocate_host(self, label: str, num_bytes: int) -> Segment:
        return self._host.allocate(label, num_bytes)

    def allocate_sparse(self, label: str, num_bytes: int) -> Segment:
        return self._host.allocate_sparse(label, num_bytes)

    def available_bytes(self) -> int:
        return sum(end - begin for begin, end in self._gaps())

    def cores(self) -> tuple[int, ...]:
        return nearest_cores(read_numa_nodes(), self._geometry.node)

    def tensor_memory(self) -> None:
        return None

    def snapshot_pool(self, plan: _native.GroupPlan) -> None:
        return None

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _fill_holes(self, label: str, fd: int, begin: int, num_bytes: int) -> None:
        """Allocates disk space for a part of a file; without it, a write would cause SIGBUS."""
        try:
            os.posix_fallocate(fd, begin, num_bytes)
        except OSError as error:
            raise OutOfDeviceMemoryError(
                f"{label} needs {num_bytes / 2**20:.1f} MiB of {self.path}, a file with holes, for which its file "
                f"system has no room: {error.strerror}. Make room there, or choose another device."
            ) from error

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Start and end of each free range, in the order of the device."""
        return _gaps(self._fd, 0, self._geometry.num_bytes)

    def _shortage(self, label: str, num_bytes: int) -> str:
        gaps = [end - begin for begin, end in self._gaps()]
        all_bytes = self._geometry.num_bytes
        return (
            f"{label} needs {num_bytes / 2**20:.1f} MiB of {self.path} in one piece; of {all_bytes / 2**20:.1f} MiB "
            f"{sum(gaps) / 2**20:.1f} are free, {max(gaps, default=0) / 2**20:.1f} in one piece. Use fewer workers, "
            "a smaller model, or memory devices on several DAX devices."
        )


def dax_geometry(path: str) -> DaxGeometry:
    """Reads a DAX device's properties; does not open it.

    Raises:
        ValueError: If it is not a DAX device, is too small, or is not aligned.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        files = [f"/dev/{device.name}" for device in read_dax_devices() if device.is_file]
        devices = ", ".join(files) or "no DAX devices"
        raise ValueError(
            f"{path}: {error.strerror}; this machine has {devices}. One that `daxctl list` shows as system-ram is a "
            "NUMA node instead: numa:N"
        ) from None
    if stat.S_ISCHR(status.st_mode):
        geometry = _geometry_of_device(path, status.st_rdev)
    elif stat.S_ISREG(status.st_mode):
        geometry = DaxGeometry(num_bytes=status.st_size, is_file=True)
    else:
        raise ValueError(f"{path} is neither a DAX device nor a file")
    unit = geometry.alignment_bytes
    if geometry.num_bytes < unit:
        raise ValueError(
            f"{path} has {geometry.num_bytes} bytes, which is too small: segments take {unit >> 20} MiB at least"
        )
    if geometry.num_bytes % unit:
        raise ValueError(
            f"{path} is not aligned: its {geometry.num_bytes} bytes are no multiple of {unit}. Make it anew with "
            f"daxctl create-device -s, or truncate -s for a file"
        )
    return geometry


def is_kernels_own(path: str) -> bool:
    """Whether a device's file is the kernel's own for the whole machine, whose locks all processes see.

    mknod creates others, for example `docker run --device` for each container. True also if unknown.
    """
    device = os.stat(path).st_dev
    mounted = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_text(errors="replace").splitlines():
        fields, _, source = line.partition(" - ")
        if fields.split()[2] == mounted:
            return source.split()[0] == "devtmpfs"
    return True


def _geometry_of_device(path: str, number: int) -> DaxGeometry:
    folder = _SYSFS / f"dev/char/{os.major(number)}:{os.minor(number)}"
    try:
        num_bytes = int((folder / "size").read_text())
    except (OSError, ValueError):
        raise ValueError(f"{path} is a character device, but no DAX device") from None
    if (folder / "driver").resolve().name == "kmem":
        node = _number(folder / "target_node", default=-1)
        raise ValueError(f"{path} is memory of the system now, of NUMA node {node}: use numa:{node}")
    alignment_bytes = _number(folder / "align", default=_ALIGNMENT_BYTES)
    return DaxGeometry(
        num_bytes=num_bytes,
        alignment_bytes=max(alignment_bytes, _ALIGNMENT_BYTES),
        node=_number(folder / "numa_node", default=-1),
    )


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text(), 0)
    except (OSError, ValueError):
        return default


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        advice = f"; as root: chgrp and chmod g+rw {path}" if isinstance(error, PermissionError) else ""
        raise ValueError(f"{path} cannot be opened: {error.strerror}{advice}") from None


def _reopen(fd: int) -> int:
    """A new open file description, with its own locks."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _lock_whole(fd: int, path: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise DeviceMemoryBusyError(
                    f"{path} is for one memory device alone, and {_describe_holders(path)} has it. End that first, "
                    "or choose another device"
                ) from None
        time.sleep(_POLL_S)


def _lock_extent(fd: int, begin: int, end: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, end - begin, 0))


def _gaps(fd: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges within [begin, end) that no other open file description has locked."""
    if begin >= end:
        return
    wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, end - begin, 0)
    kind, _, start, length, _ = _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted))
    if kind == fcntl.F_UNLCK:
        yield begin, end
        return
    yield from _gaps(fd, begin, start)
    yield from _gaps(fd, start + length, end)


def _describe_holders(path: str) -> str:
    found = set(_holders(path))
    others = found - {os.getpid()} or found  # this process has opened it too, for this query
    holders = [f"process {pid} ({_command(pid)})" for pid in sorted(others)]
    return " or ".join(holders) or "a process of another user"


def _holders(path: str) -> Iterator[int]:
    """Processes with a descriptor of a file, as far as this process has permission to look."""
    real_path = os.path.realpath(path)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) == real_path for link in (folder / "fd").iterdir()):
                yield int(folder.name)
        except OSError:  # the process has ended, or belongs to another user
            continue


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "ended"
    return b" ".join(words).decode(errors="replace").strip()[:_MOST_COMMAND_CHARACTERS]

"""Records this process's part of the job's timeline (docs/design/timeline.md).

A process has one recorder for all of its sessions, because threads of native code record without knowing a session.
Unless start() was called, nothing is recorded, and span() costs less than a microsecond.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from coarse.kernels import _native
from coarse.timeline.part_files import EVENTS_SUFFIX, NAMES_SUFFIX, GroupNames, Process, parts_folder


class _Part:
    """The two files of this process: its events, which native code writes, and their names.

    Args:
        target: The trace to which they belong.
        process: This process.
        num_events: Number of events to keep, rounded up to a power of two.

    Raises:
        OSError: If they cannot be made.
    """

    def __init__(self, target: Path, process: Process, num_events: int) -> None:
        folder = parts_folder(target)
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{process.role.replace(' ', '-')}-{process.number}-node-{process.node}-pid-{os.getpid()}"
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._names: TextIO = (folder / f"{stem}{NAMES_SUFFIX}").open("w", encoding="utf-8", buffering=1)
        self._write({"process": asdict(process) | _clock_and_place()})
        _open_events(folder / f"{stem}{EVENTS_SUFFIX}", num_events)

    def number_of(self, name: str) -> int:
        """The number under which events have this name."""
        with self._lock:
            number = self._numbers.get(name)
            if number is None:
                number = self._numbers[name] = len(self._numbers)
                self._write({"name": name, "number": number})
            return number

    def note(self, group: GroupNames) -> None:
        with self._lock:
            self._write({"group": asdict(group)})

    def close(self) -> None:
        _native.close_timeline()
        self._names.close()

    def _write(self, record: dict[str, object]) -> None:
        self._names.write(json.dumps(record) + "\n")


_part: _Part | None = None


def start(target: str, process: Process, *, num_events: int) -> None:
    """Records from now on, until the process ends or stop() is called; does nothing if it records already.

    Args:
        target: The trace's file; "" records nothing.
        process: This process.
        num_events: Number of events to keep, rounded up to a power of two; the oldest are overwritten.

    Raises:
        OSError: If the file cannot be made: no permission, or no room on the disk.
    """
    global _part
    if not target or _part is not None:
        return
    try:
        _part = _Part(Path(target).absolute(), process, num_events)
    except OSError as error:
        place = parts_folder(Path(target).absolute())
        raise OSError(
            error.errno,
            f"COARSE_TIMELINE={target}: {place} cannot be written: {os.strerror(error.errno or 0)}",
        ) from None
    os.register_at_fork(after_in_child=_forget)  # the part is its parent's


def stop() -> None:
    """Ends recording. Idempotent."""
    global _part
    if _part is not None:
        _part.close()
        _part = None


def is_recording() -> bool:
    """Whether this process records a timeline."""
    return _part is not None


def note_group(group: GroupNames) -> None:
    """Tells the names of a tensor group, if this process records."""
    if _part is not None:
        _part.note(group)


class span:  # noqa: N801 - used like a function
    """Records the time of a `with` block under a name, if this process records."""

    __slots__ = ("_began_ns", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._began_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        record(self._name, self._began_ns, time.monotonic_ns())


def record(name: str, began_ns: int, ended_ns: int) -> None:
    """Records work of the calling thread that has ended, if this process records; times of time.monotonic_ns()."""
    if _part is not None:
        _native.record_span(_part.number_of(name), began_ns, ended_ns - began_ns)


def mark(name: str) -> None:
    """Records a moment under a name, if this process records."""
    if _part is not None:
        _native.record_span(_part.number_of(name), time.monotonic_ns(), _native.TIMELINE_INSTANT)


def _forget() -> None:
    global _part
    _part = None


def _clock_and_place() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "realtime_minus_monotonic_ns": time.time_ns() - time.monotonic_ns(),
    }


def _open_events(path: Path, num_events: int) -> None:
    capacity = 1 << max(0, num_events - 1).bit_length()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        # A full disk must be an error now, because writing to mapped memory would end the process by a signal.
        os.posix_fallocate(fd, 0, _native.timeline_bytes(capacity))
        _native.open_timeline(fd, capacity)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)

"""Where the workers of a job's next attempt find memory devices that outlived the last attempt's workers.

    <root>/<job>/<session>/   md0.sock, md1.sock, ..., token, kept.json

The root is one of coarse.security.private_directories: this user's alone (mode 0700), under a name that no other user
can take. The memory devices remove these directories when they end; if they were killed, `coarse run` removes them,
or else the next job with persistent devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from coarse.security import private_directories
from coarse.wire.socket_directory import KEPT_FILE, OwnSocket

_MOST_TRIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentDevices:
    """The memory devices of a session that may outlive its workers.

    Args:
        workers: The client numbers that each device serves.
        memories: The name of each device's memory.
        pids: Process ids of the devices.
    """

    workers: tuple[tuple[int, ...], ...]
    memories: tuple[str, ...]
    pids: tuple[int, ...]

    def write(self, directory: Path) -> None:
        """Writes a file in their directory, atomically."""
        temporary = directory / f"{KEPT_FILE}.tmp"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(directory / KEPT_FILE)

    @classmethod
    def read(cls, directory: Path) -> PersistentDevices | None:
        """Reads the file of write(); None if none exists."""
        try:
            values = json.loads((directory / KEPT_FILE).read_text())
        except FileNotFoundError:
            return None
        return cls(
            workers=tuple(map(tuple, values["workers"])),
            memories=tuple(values["memories"]),
            pids=tuple(values["pids"]),
        )


def find_session_directory(job: str, session: str) -> Path | None:
    """The directory of the memory devices of one session of a job; None if none exists.

    Args:
        job: Name of the job.
        session: Name of the session within the job.
    """
    return private_directories.find(_name(job, session))


def make_session_directory(job: str, session: str) -> Path:
    """Creates an empty directory for a session.

    Raises:
        OSError: If it cannot be created.
    """
    for attempt in range(_MOST_TRIES):
        try:
            if (before := find_session_directory(job, session)) is not None:
                shutil.rmtree(before, ignore_errors=True)
            private_directories.remove_abandoned()
            directory = private_directories.make_root() / _name(job, session)
            directory.parent.mkdir(mode=0o700, exist_ok=True)
            directory.mkdir(mode=0o700)
            break
        except FileNotFoundError:  # a session that just ended has removed the parent
            if attempt == _MOST_TRIES - 1:
                raise
    return directory


def leave_session_directory(own: OwnSocket) -> None:
    """Removes the directory of a memory device that ends together with all devices of its session.

    Keeps the directory if it now belongs to another session of the same name, or if another device has replaced this
    one.

    Args:
        own: The socket on which this process listened.
    """
    directory = own.path.parent
    if own.is_in_place():
        kept = PersistentDevices.read(directory)
        if kept is None:  # the session never began
            own.abandon()
        elif os.getpid() in kept.pids:
            shutil.rmtree(directory, ignore_errors=True)
    for path in (directory.parent, directory.parent.parent):
        with contextlib.suppress(OSError):  # not empty, or gone
            path.rmdir()


def persistent_pids(job: str) -> set[int]:
    """Processes of all memory devices that may outlive the job's workers."""
    found: set[int] = set()
    for root in private_directories.find_roots():
        with contextlib.suppress(OSError):
            for directory in (root / _digest(job, 16)).iterdir():
                kept = PersistentDevices.read(directory)
                found.update(() if kept is None else kept.pids)
    return found


def forget_job(job: str) -> None:
    """Removes the files that killed memory devices of a job have left."""
    for root in private_directories.find_roots():
        with contextlib.suppress(OSError):  # nothing there
            (root / _digest(job, 16)).lstat()
            shutil.rmtree(root / _digest(job, 16), ignore_errors=True)
            root.rmdir()


def _name(job: str, session: str) -> str:
    """Name of a session's directory in its root."""
    return f"{_digest(job, 16)}/{_digest(session, 8)}"


def _digest(name: str, length: int) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:length]

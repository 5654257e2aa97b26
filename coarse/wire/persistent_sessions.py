"""Where the workers of a job's next attempt find memory devices that have outlived those of the last one.

    <root>/<job>/<session>/   md0.sock, md1.sock, ..., token, kept.json

The root is one of coarse.private_directories: this user's alone (mode 0700), under a name that no other user
can take. Whoever ends last removes them: the memory devices, `coarse run` where these were killed, or else the next
job whose devices may be kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from coarse import private_directories
from coarse.wire.socket_directory import KEPT_FILE, OwnSocket

_MOST_TRIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentDevices:
    """The memory devices of a session that may outlive its workers.

    Args:
        workers: The client numbers that each of them serves.
        memories: What each of them owns, by name.
        pids: Of their processes.
    """

    workers: tuple[tuple[int, ...], ...]
    memories: tuple[str, ...]
    pids: tuple[int, ...]

    def write(self, directory: Path) -> None:
        """Leaves word in their directory, at once and whole."""
        temporary = directory / f"{KEPT_FILE}.tmp"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(directory / KEPT_FILE)

    @classmethod
    def read(cls, directory: Path) -> PersistentDevices | None:
        """What write() has left there; None if there is nothing."""
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
    """The directory of the memory devices of one session of a job; None if there is none.

    Args:
        job: Name of the job.
        session: Name of the session within the job.
    """
    return private_directories.find(_name(job, session))


def make_session_directory(job: str, session: str) -> Path:
    """Makes the directory of a session, empty.

    Raises:
        OSError: If it cannot be made.
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
        except FileNotFoundError:  # a session that ended at this moment has removed the parent
            if attempt == _MOST_TRIES - 1:
                raise
    return directory


def leave_session_directory(own: OwnSocket) -> None:
    """Removes the directory in which a memory device has listened that ends now, as all of its session do.

    Unless it is another session's by now, which has the same name, or another device has taken this one's place.

    Args:
        own: Where this process has listened.
    """
    directory = own.path.parent
    if own.is_in_place():
        kept = PersistentDevices.read(directory)
        if kept is None:  # its session never came about
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
    """Removes what memory devices of a job have left behind that were killed."""
    for root in private_directories.find_roots():
        with contextlib.suppress(OSError):  # nothing there
            (root / _digest(job, 16)).lstat()
            shutil.rmtree(root / _digest(job, 16), ignore_errors=True)
            root.rmdir()


def _name(job: str, session: str) -> str:
    """Of a session's directory in its root."""
    return f"{_digest(job, 16)}/{_digest(session, 8)}"


def _digest(name: str, length: int) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:length]

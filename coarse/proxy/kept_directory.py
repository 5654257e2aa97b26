"""Where the workers of a job's next attempt find memory devices that have outlived those of the last one.

    <temporary directory>/coarse-<user>/<job>/<session>/   md0.sock, md1.sock, ..., token, kept.json

The directories are this user's alone (mode 0700). Whoever ends last removes them: the memory devices, `coarse run`
where these were killed, or else the next job whose devices may be kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from coarse.errors import RendezvousError
from coarse.proxy.socket_directory import KEPT_FILE, OwnSocket
from coarse.scratch import remove_if_abandoned

_MOST_TRIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDevices:
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
    def read(cls, directory: Path) -> KeptDevices | None:
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


def session_directory(job: str, session: str) -> Path:
    """The directory of the memory devices of one session of a job, whether it is there or not.

    Args:
        job: Name of the job.
        session: Name of the session within the job.
    """
    return _job_directory(job) / _digest(session, 8)


def require_private_root() -> None:
    """Has nobody look for memory devices where another user may have put something.

    Raises:
        RendezvousError: If somebody else has prepared the directory of all jobs of this user.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_private(_root())


def make_session_directory(job: str, session: str) -> Path:
    """Makes session_directory(), empty.

    Raises:
        RendezvousError: If another user could get in.
        OSError: If it cannot be made.
    """
    directory = session_directory(job, session)
    for attempt in range(_MOST_TRIES):
        try:
            _make_private(
                _root()
            )  # before anything is removed: another user's links would lead to what is not theirs
            shutil.rmtree(directory, ignore_errors=True)
            _remove_abandoned()
            _make_private(directory.parent)
            directory.mkdir(mode=0o700)
            break
        except FileNotFoundError:  # a session that ended at this moment has removed the parent
            if attempt == _MOST_TRIES - 1:
                raise
    return directory


def _remove_abandoned() -> None:
    """Removes what sessions of this user have left behind that were killed."""
    for session in _root().glob("*/*"):
        remove_if_abandoned(session)
        with contextlib.suppress(OSError):  # not empty, or gone
            session.parent.rmdir()


def leave_session_directory(own: OwnSocket) -> None:
    """Removes the directory in which a memory device has listened that ends now, as all of its session do.

    Unless it is another session's by now, which has the same name, or another device has taken this one's place.

    Args:
        own: Where this process has listened.
    """
    directory = own.path.parent
    if own.is_in_place():
        kept = KeptDevices.read(directory)
        if kept is None:  # its session never came about
            own.abandon()
        elif os.getpid() in kept.pids:
            shutil.rmtree(directory, ignore_errors=True)
    for path in (directory.parent, directory.parent.parent):
        with contextlib.suppress(OSError):  # not empty, or gone
            path.rmdir()


def kept_pids(job: str) -> set[int]:
    """Processes of all memory devices that may outlive the job's workers."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for directory in _job_directory(job).iterdir():
            kept = KeptDevices.read(directory)
            found.update(() if kept is None else kept.pids)
    return found


def forget_job(job: str) -> None:
    """Removes what memory devices of a job have left behind that were killed."""
    with contextlib.suppress(OSError):  # nothing there, or somebody else's
        _job_directory(job).lstat()
        shutil.rmtree(_job_directory(job), ignore_errors=True)
        _root().rmdir()


def _root() -> Path:
    return Path(tempfile.gettempdir()) / f"coarse-{os.geteuid()}"


def _job_directory(job: str) -> Path:
    return _root() / _digest(job, 16)


def _digest(name: str, length: int) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:length]


def _make_private(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    _check_private(path)


def _check_private(path: Path) -> None:
    """Others may have made a directory of that name in a temporary directory that all can write to."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise RendezvousError(
            f"{path} is no directory of this user alone, so that memory devices cannot be found there safely; remove "
            "it, or set TMPDIR"
        )

"""Directories of one user, which all of the user's processes on this machine find and no other user can take.

<temporary directory>/coarse-<user>            the usual root
<temporary directory>/coarse-<user>-<random>   where another user has taken that name
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from coarse.process.scratch import remove_if_abandoned

logger = logging.getLogger(__name__)


def find_roots() -> list[Path]:
    """The roots that are there, the usual one first. One that another user could enter is none."""
    usual = _usual_root()
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(usual.parent) if name.startswith(f"{usual.name}-"))
    return [root for root in (usual, *(usual.parent / name for name in names)) if is_private(root)]


def make_root() -> Path:
    """The first root that is there, or a new one.

    Logs a warning if another user has taken the usual name, or could enter a directory of that name.

    Raises:
        OSError: If it cannot be made.
    """
    usual = _usual_root()
    with contextlib.suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    if roots := find_roots():
        return roots[0]
    made = Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=usual.parent))
    logger.warning("%s %s; using %s instead", usual, _describe(usual), made)
    return made


def find(name: str) -> Path | None:
    """The directory `name` of a root; None if no root has one."""
    return next((root / name for root in find_roots() if (root / name).is_dir()), None)


def remove_abandoned() -> None:
    """Removes directories `<root>/*/*` that nobody holds (coarse.process.scratch): what killed processes leave."""
    for root in find_roots():
        for directory in root.glob("*/*"):
            remove_if_abandoned(directory)
            with contextlib.suppress(OSError):  # not empty, or gone
                directory.parent.rmdir()


def is_private(path: Path) -> bool:
    """Whether this is a directory of this user, which no other user can enter. A symbolic link is none."""
    try:
        return _is_private(path.lstat())
    except OSError:
        return False


@contextlib.contextmanager
def entered(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Another name of a private directory, which leads to the one that was checked, whatever becomes of its path.

    Raises:
        PermissionError: If it is another user's, others can enter it, or it is no directory.
        OSError: If there is nothing of that name.
    """
    try:
        directory_fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise PermissionError(f"{os.fspath(path)} is a symbolic link or a file, not a directory") from None
    try:
        found = os.fstat(directory_fd)
        if not _is_private(found):
            raise PermissionError(
                f"{os.fspath(path)} is a directory of user {found.st_uid} with mode "
                f"{stat.S_IMODE(found.st_mode):03o}; it must be one that only user {os.geteuid()} can enter"
            )
        yield Path(f"/proc/self/fd/{directory_fd}")
    finally:
        os.close(directory_fd)


def _usual_root() -> Path:
    return Path(tempfile.gettempdir()) / f"coarse-{os.geteuid()}"


def _is_private(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _describe(path: Path) -> str:
    """Why a path is no private directory."""
    try:
        found = path.lstat()
    except OSError as error:
        return f"cannot be entered ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    return "can be entered by other users"

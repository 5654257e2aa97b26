"""Notes of workers to `coarse run`, through a pipe that they inherit: a session's decisions, and its summary.

A note is one JSON object on a line of at most 4096 bytes, which the system writes as a whole. The environment names
the pipe by descriptor and inode, because a program may have closed the descriptor and opened another file.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import Any, TypeAlias

Note: TypeAlias = dict[str, Any]
"""A note, as JSON values."""

_MOST_BYTES = 4096  # PIPE_BUF
_MOST_NOTES_BYTES = 1 << 16


class NotesPipe:
    """The launcher's end; close() it. Workers inherit `inherited_fd`."""

    def __init__(self) -> None:
        self.fd, self.inherited_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pending = b""

    @property
    def name(self) -> str:
        """The value of COARSE_NOTES_PIPE for the workers."""
        return f"{self.inherited_fd}:{os.fstat(self.inherited_fd).st_ino}"

    def read(self) -> list[Note]:
        """The notes that have arrived. Lines that are none are left out."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, _MOST_NOTES_BYTES)
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._pending = self._pending[-_MOST_BYTES:]
        return [note for line in lines if (note := _parse(line))]

    def close(self) -> None:
        """Closes both ends; call it once."""
        os.close(self.fd)
        os.close(self.inherited_fd)


def tell_launcher(pipe: str, note: Note) -> None:
    """Sends a note; does nothing without a launcher, or if it does not read.

    Args:
        pipe: COARSE_NOTES_PIPE; "" without a launcher that reads notes.
        note: The note; dropped if it is too long.
    """
    fd, _, inode = pipe.partition(":")
    data = json.dumps(note).encode() + b"\n"
    if not (fd.isdecimal() and inode.isdecimal()) or len(data) > _MOST_BYTES:
        return
    with contextlib.suppress(OSError):
        found = os.fstat(int(fd))
        if stat.S_ISFIFO(found.st_mode) and found.st_ino == int(inode):
            os.write(int(fd), data)


def _parse(line: bytes) -> Note | None:
    try:
        note = json.loads(line)
    except ValueError:
        return None
    return note if isinstance(note, dict) else None

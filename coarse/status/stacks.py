"""The Python stacks of this process's threads, as plain values."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_LIBRARY_FOLDERS = ("site-packages", "dist-packages")
_OWN_THREADS = "coarse-"
_MOST_FRAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One call on a stack.

    Args:
        function: Name of the function.
        file: Path of its file.
        line: Line that runs.
        is_library: Whether the file belongs to Python, an installed package or COARSE, not to the user's program.
    """

    function: str
    file: str
    line: int
    is_library: bool

    def __str__(self) -> str:
        return f"{self.function} ({os.path.basename(self.file)}:{self.line})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The calls of one thread.

    Args:
        thread: Its name.
        is_main: Whether it is the main thread.
        frames: Innermost call first.
    """

    thread: str
    is_main: bool
    frames: tuple[Frame, ...]

    @property
    def is_in_coarse(self) -> bool:
        """Whether the innermost Python call is COARSE's, and the thread is none of COARSE's own."""
        is_own = self.thread.startswith(_OWN_THREADS)
        return bool(self.frames) and not is_own and self.frames[0].file.startswith(_PACKAGE)

    def in_a_line(self) -> str:
        """The innermost calls of the user's program, or of libraries if no others exist; "" without any."""
        program = [frame for frame in self.frames if not frame.is_library] or list(self.frames)
        return ", from ".join(map(str, program[:_MOST_FRAMES]))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Stack:
        """Reads dataclasses.asdict() of a Stack."""
        return cls(**{**values, "frames": tuple(Frame(**each) for each in values["frames"])})


def read_stacks() -> list[Stack]:
    """The stacks of all threads of this process except the calling one, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    stacks = [
        Stack(thread=names.get(ident, f"thread {ident}"), is_main=ident == main, frames=_frames(innermost))
        for ident, innermost in sys._current_frames().items()
        if ident != own
    ]
    return sorted(stacks, key=lambda stack: not stack.is_main)


def _frames(frame: FrameType | None) -> tuple[Frame, ...]:
    frames = []
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        frames.append(
            Frame(function=code.co_name, file=file, line=frame.f_lineno or 0, is_library=_is_library(file))
        )
        frame = frame.f_back
    return tuple(frames)


def _is_library(file: str) -> bool:
    is_installed = any(f"{os.sep}{folder}{os.sep}" in file for folder in _LIBRARY_FOLDERS)
    return is_installed or file.startswith((_PACKAGE, _STANDARD_LIBRARY, "<frozen"))

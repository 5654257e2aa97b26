"""Prints the workers' output: splits it into lines, marks them with the worker, and keeps progress bars readable.

    pipe ──► OutputPipe ──► LineSplitter ──► Console ──► stdout or stderr of the launcher
                │                            └ Screen: the progress bar before the cursor
                └──► log file, Tail

All classes work on bytes, because a worker may print any encoding, or none. One thread only.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

TRACEBACK_HEADER = b"Traceback (most recent call last)"

_READ_BYTES = 64 * 1024
_LONGEST_LINE_BYTES = 1024 * 1024
_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of output to show at once.

    Args:
        text: A whole line with its line end, or the current state of a progress bar without one.
        is_update: Whether the cursor stays behind `text`, because the worker will overwrite it.
    """

    text: bytes
    is_update: bool = False


class LineSplitter:
    """Splits a byte stream into whole lines, and into updates that begin or end with a carriage return.

    Guarantees: a line is one piece, regardless of the sizes of reads, and only the carriage returns around updates
    are lost. A line beyond 1 MiB is cut. An incomplete line is held until its end or finish(), unless it is an
    update.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._overwrites = False
        self._shown = b""

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Takes the next bytes and yields the pieces to show now."""
        *finished, self._pending = _LINE_END.split(self._pending + data)
        for text in finished:
            yield from self._finished(text)
        if len(self._pending) > _LONGEST_LINE_BYTES:
            yield from self.finish()
        elif self._overwrites or self._pending.endswith(b"\r"):
            yield from self._update(self._pending)

    def finish(self) -> Iterator[Piece]:
        """Yields a held incomplete line."""
        text, self._pending = self._pending, b""
        if text:
            yield from self._finished(text + b"\n")

    def _finished(self, text: bytes) -> Iterator[Piece]:
        if text.endswith(b"\r"):
            yield from self._update(text)
            self._overwrites = True
        else:
            self._overwrites = False
            yield Piece(text)
        self._shown = b""

    def _update(self, text: bytes) -> Iterator[Piece]:
        visible = text.rstrip(b"\r")
        if visible and visible != self._shown:
            self._shown = visible
            yield Piece(visible, is_update=True)


class StartupNotes:
    """Notes that TensorFlow prints when loaded, from each of its two libraries, before it reads TF_CPP_MIN_LOG_LEVEL.

    Args:
        is_shown: Whether each note is shown once; otherwise none is shown.
    """

    _NOTE = re.compile(
        rb"(?:I0000 \S+\s+\d+ port\.cc:\d+\] (oneDNN custom operations are on)"
        rb"|(WARNING: All log messages before absl::InitializeLog\(\) is called)).*\n"
    )

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._seen: set[bytes] = set()

    def hides(self, line: bytes) -> bool:
        """Whether a line is such a note and must be hidden."""
        note = self._NOTE.fullmatch(line)
        if note is None:
            return False
        text = note[1] or note[2]
        is_new = text not in self._seen
        self._seen.add(text)
        return not (self._is_shown and is_new)


class Tail:
    """The last bytes of a stream.

    Args:
        limit_bytes: Number of bytes to keep.
    """

    def __init__(self, limit_bytes: int = 64 * 1024) -> None:
        self._limit_bytes = limit_bytes
        self._kept = b""
        self.traceback_s: float | None = None
        """Start of the last traceback, in seconds of the monotonic clock; None if there was none."""

    def feed(self, data: bytes) -> None:
        """Appends `data` and drops the oldest bytes beyond the limit."""
        seam = self._kept[1 - len(TRACEBACK_HEADER) :] if self._kept else b""
        if TRACEBACK_HEADER in seam + data:
            self.traceback_s = time.monotonic()
        self._kept = (self._kept + data)[-self._limit_bytes :]

    @property
    def text(self) -> str:
        """The kept text, with undecodable bytes replaced."""
        return self._kept.decode(errors="replace")


@dataclass(slots=True)
class Screen:
    """Position of an output's cursor: behind a progress bar of `owner`, or at the start of a line."""

    owner: object = None


@dataclass(slots=True)
class Console:
    """One output of the launcher. Two consoles share a Screen if both are the same terminal.

    Args:
        fd: Descriptor to write to; may block.
        screen: Position of the cursor.
        is_terminal: Whether another worker's progress bar may be erased; its next update draws it again.
    """

    fd: int
    screen: Screen
    is_terminal: bool

    def render(self, owner: object, prefix: bytes, piece: Piece) -> bytes:
        """Returns the bytes that show `piece` of `owner`, and moves the cursor."""
        previous, self.screen.owner = self.screen.owner, owner if piece.is_update else None
        return self._lead_in(previous, owner) + prefix + piece.text

    def _lead_in(self, previous: object, owner: object) -> bytes:
        if previous is None:
            return b""
        if previous is owner:
            return b"\r"
        return b"\r\x1b[K" if self.is_terminal else b"\n"

    def write(self, data: bytes) -> None:
        """Writes all of `data`.

        Raises:
            OSError: If the reader is gone (EPIPE), or the device fails.
        """
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:  # another process that shares this terminal made it non-blocking
                select.select([], [self.fd], [])


def open_consoles() -> tuple[Console, Console]:
    """Returns the consoles of this process's stdout and stderr."""
    first, second = os.fstat(1), os.fstat(2)
    screen = Screen()
    same = os.path.samestat(first, second)
    return (
        Console(1, screen, os.isatty(1)),
        Console(2, screen if same else Screen(), os.isatty(2)),
    )


@dataclass(slots=True, eq=False)
class OutputPipe:
    """One output stream of one worker, from its pipe to its destinations.

    Args:
        fd: Read end of the pipe, non-blocking. Owned: closed by close().
        prefix: Printed before each line.
        console: Console; None if the stream goes only to the log.
        log_fd: Receives the unchanged bytes; None for no log. Not owned.
        tail: Keeps the last bytes; None if they are not needed.
        instead: Replacement for the log of a stream without a console, if the log can no longer be written.
        notes: Lines that the console omits; None for none.
        on_unread: Called with the error when the console can no longer be written and there is no log.
    """

    fd: int
    prefix: bytes
    console: Console | None
    log_fd: int | None = None
    tail: Tail | None = None
    instead: Console | None = None
    notes: StartupNotes | None = None
    on_unread: Callable[[OSError], None] = lambda error: None
    is_open: bool = True
    _splitter: LineSplitter = field(default_factory=LineSplitter)

    def pump(self) -> bool:
        """Forwards up to 64 KiB from the pipe; returns False once the pipe is empty or has ended.

        Closes itself at the end of the stream. If the console has no reader and there is no log, output is dropped
        until the worker has ended. Otherwise the worker's errors about closed output would hide why it ends.
        """
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._pass_on(data)
        else:
            self.close()
        return self.is_open

    def close(self) -> None:
        """Shows an incomplete last line and closes the pipe. Idempotent."""
        if self.is_open:
            self.is_open = False
            self._show(self._splitter.finish())
            os.close(self.fd)

    def _pass_on(self, data: bytes) -> None:
        if self.tail is not None:
            self.tail.feed(data)
        if self.log_fd is not None:
            self._log(self.log_fd, data)
        self._show(self._splitter.feed(data))

    def _log(self, log_fd: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(log_fd, view) :]
        except OSError as error:
            self.log_fd = None
            if self.console is None:
                self.console = self.instead
            self._show(iter([Piece(f"coarse run: log stopped: {error.strerror}\n".encode())]))

    def _show(self, pieces: Iterator[Piece]) -> None:
        if self.console is None:
            return
        console = self.console
        shown = [piece for piece in pieces if self.notes is None or not self.notes.hides(piece.text)]
        data = b"".join([console.render(self, self.prefix, piece) for piece in shown])
        try:
            console.write(data)
        except OSError as error:
            self.console = None
            if self.log_fd is None:
                self.on_unread(error)

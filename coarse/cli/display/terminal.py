"""The terminal of a command that fills the screen: single terminal, Ctrl-Z, and changes of its size."""

from __future__ import annotations

import contextlib
import enum
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from types import FrameType


class TerminalEvent(enum.Enum):
    """Input from the user or the terminal; a later value overrides earlier ones."""

    NOTHING = enum.auto()
    RESIZED = enum.auto()
    CONTINUED = enum.auto()
    """The process had been stopped, and the screen may show anything."""
    SUSPEND = enum.auto()
    """The user has pressed Ctrl-Z, and this process goes on: leave the screen, and call suspend()."""
    QUIT = enum.auto()


_SIGNALS = {
    signal.SIGWINCH: TerminalEvent.RESIZED,
    signal.SIGCONT: TerminalEvent.CONTINUED,
    signal.SIGTSTP: TerminalEvent.SUSPEND,
}


class TerminalInput:
    """Single terminal and signals of the terminal, within a `with` block in the main thread; Ctrl-C stays a signal.

    Args:
        quit_key: The key that ends the command.
    """

    def __init__(self, quit_key: str) -> None:
        self._quit_key = quit_key
        self._inputs = [sys.stdin.fileno()] if sys.stdin.isatty() else []
        self._signals = -1
        self._block = contextlib.ExitStack()

    def __enter__(self) -> TerminalInput:
        with contextlib.ExitStack() as block:
            self._signals = block.enter_context(_signals_in_a_pipe())
            for fd in self._inputs:
                block.callback(termios.tcsetattr, fd, termios.TCSADRAIN, termios.tcgetattr(fd))
                tty.setcbreak(fd)
            self._block = block.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._block.close()

    def wait(self, timeout_s: float) -> TerminalEvent:
        """Waits at most `timeout_s` for a signal or the key; QUIT also if the terminal is gone."""
        until_s = time.monotonic() + timeout_s
        event = TerminalEvent.NOTHING
        while event is TerminalEvent.NOTHING:
            left_s = max(0.0, until_s - time.monotonic())
            ready = select.select([self._signals, *self._inputs], [], [], left_s)[0]
            if not ready:
                return TerminalEvent.NOTHING
            event = max(map(self._read, ready), key=lambda each: each.value)
        return event

    def _read(self, fd: int) -> TerminalEvent:
        data = os.read(fd, 64)
        if fd == self._signals:
            events = [_SIGNALS[signal.Signals(number)] for number in data if number in _SIGNALS]
            return max(events, key=lambda each: each.value, default=TerminalEvent.NOTHING)
        is_quit = not data or self._quit_key in data.decode(errors="ignore").lower()
        return TerminalEvent.QUIT if is_quit else TerminalEvent.NOTHING


def suspend() -> None:
    """Stops this process as Ctrl-Z does by default; returns when it is continued."""
    signal.raise_signal(signal.SIGTSTP)


@contextlib.contextmanager
def _signals_in_a_pipe() -> Iterator[int]:
    """Makes the numbers of signals readable, each as a byte; ignored ones stay ignored."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    watched = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, _do_nothing) for number in watched}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler, so that the signal reaches the wakeup descriptor."""

"""Entry point of the `coarse` command: finds the sub-command and calls its module.

A sub-command's module has a function `add_parser(subparsers)`, which adds one parser. The parser's default `handler`
is a function that takes the parsed arguments and returns the exit code. If the module imports packages of one of
COARSE's extras, the parser's default `extra` names it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import NoReturn

from coarse import __version__
from coarse.cli.examples import examples_of
from coarse.errors import CoarseError, SettingsError

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run": "coarse.cli.run",
        "status": "coarse.cli.status",
        "top": "coarse.cli.top",
        "dashboard": "coarse.cli.dashboard",
        "doctor": "coarse.cli.doctor",
        "device": "coarse.cli.device",
        "bench": "coarse.cli.bench",
        "machine": "coarse.cli.machine",
        "profile": "coarse.cli.profile",
        "plan": "coarse.cli.plan",
        "simulate": "coarse.cli.simulate",
        "checkpoint": "coarse.cli.checkpoint",
        "completion": "coarse.cli.completion",
        "timeline": "coarse.cli.timeline",
    }
)
"""Module of each sub-command, in the order of the help text."""

_EXIT_FAILED, _EXIT_USAGE = 1, 2
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_EXIT_NOBODY_READS = 128 + signal.SIGPIPE


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that reports usage errors in one line, with exit code 2, and ends its help with examples."""

    def format_help(self) -> str:
        return super().format_help() + examples_of(self.prog)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see `{self.prog} --help`)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; usage errors, --help and --version raise SystemExit.

    Args:
        argv: Arguments without the program's name; default: those of this process.
    """
    _open_standard_streams()
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser(_commands_needed(argv))
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        prog, names = f"{parser.prog} {arguments.command}", " ".join(unknown)
        parser.exit(_EXIT_USAGE, f"{prog}: error: unrecognized arguments: {names} (see `{prog} --help`)\n")
    handler: Callable[[argparse.Namespace], int] = arguments.handler
    try:
        with told_to_end_as_by_ctrl_c():
            code = handler(arguments)
        sys.stdout.flush()
        return code
    except CoarseError as error:
        print(f"coarse {arguments.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return _EXIT_USAGE if isinstance(error, SettingsError) else _EXIT_FAILED
    except ModuleNotFoundError as error:
        extra = vars(arguments).get("extra")
        if extra is None:
            raise
        print(
            f"coarse {arguments.command}: {error.msg}; pip install 'coarse-train[{extra}]' brings it",
            file=sys.stderr,
        )
        return _EXIT_FAILED
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads_output():
            return _EXIT_NOBODY_READS
        _flush_or_discard_output()
        print(f"coarse {arguments.command}: {error}", file=sys.stderr)
        return _EXIT_FAILED
    except KeyboardInterrupt as told:
        return 128 + (told.number if isinstance(told, ToldToEnd) else signal.SIGINT)


class ToldToEnd(KeyboardInterrupt):
    """A signal other than Ctrl-C's has ended the command.

    Args:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def told_to_end_as_by_ctrl_c() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise ToldToEnd within the context, so that unfinished work is cleaned up.

    Has no effect on ignored signals, or outside of the main thread.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise ToldToEnd(number)

    is_main = threading.current_thread() is threading.main_thread()
    heard = [number for number in _ENDING_SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def build_parser(commands: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser with the named sub-commands, importing only their modules."""
    parser = OneLineParser(
        prog="coarse", description="Data-parallel training synchronised by disaggregated memory devices."
    )
    parser.add_argument("--version", action="version", version=f"coarse {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in commands:
        importlib.import_module(COMMANDS[name]).add_parser(subparsers)
    return parser


def _open_standard_streams() -> None:
    """Opens standard streams that the shell has closed (`>&-`), so that no other file gets their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            _lead_nowhere(number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _nobody_reads_output() -> bool:
    """Whether standard output is a pipe whose reader has closed it; output is then discarded."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    _lead_nowhere(sys.stdout.fileno())
    return True


def _flush_or_discard_output() -> None:
    """Flushes output; discards it on failure, because the interpreter would try again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        _lead_nowhere(sys.stdout.fileno())


def _lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _commands_needed(argv: Sequence[str]) -> Sequence[str]:
    if argv and argv[0] in COMMANDS:
        return (argv[0],)
    return () if list(argv) == ["--version"] else tuple(COMMANDS)


if __name__ == "__main__":
    raise SystemExit(main())

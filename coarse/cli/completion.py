"""`coarse completion`: the script by which a shell completes COARSE's commands and options."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "tcsh")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `completion` to the `coarse` command."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script by which a shell completes this command",
        description="Prints a script by which a shell completes COARSE's commands and options.",
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(handler=run, extra="completion")


def run(arguments: argparse.Namespace) -> int:
    """Runs `coarse completion`; returns its exit code."""
    import shtab

    from coarse.cli.main import COMMANDS, build_parser

    print(shtab.complete(build_parser(tuple(COMMANDS)), arguments.shell))
    return 0

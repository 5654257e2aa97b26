"""`coarse timeline`: merges the parts of a job's timeline, for torchrun and other launchers and for several nodes."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
With COARSE_TIMELINE=FILE each process of a job records its part into the folder FILE.parts. `coarse run` merges them
into FILE at the end of a job of one node. This command does it for jobs of other launchers, and of several nodes
after you have copied the parts of all nodes into one folder."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `timeline` to the `coarse` command."""
    parser = subparsers.add_parser("timeline", help="merge the trace of a job", description=_DESCRIPTION)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    merging = actions.add_parser("merge", help="merge FILE.parts into FILE", description=_DESCRIPTION)
    merging.add_argument("file", type=Path, metavar="FILE", help="the value of COARSE_TIMELINE")
    merging.add_argument("--keep-parts", action="store_true", help="leave the folder FILE.parts")
    merging.set_defaults(handler=run_merge)


def run_merge(arguments: argparse.Namespace) -> int:
    """Merges the parts; returns 0.

    Raises:
        TimelineError: If there are none.
        OSError: If the trace cannot be written.
    """
    from coarse.timeline.merge import merge

    print(f"{arguments.file}: {merge(arguments.file, keeps_parts=arguments.keep_parts)}")
    return 0

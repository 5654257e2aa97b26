"""`coarse device`: the entry point of a memory device process."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the sub-command."""
    parser = subparsers.add_parser(
        "device",
        help="run a memory device (sessions start theirs by themselves)",
        description="Runs one memory device of a session. Sessions start these processes by themselves and hand "
        "each its place in the job through an inherited descriptor.",
    )
    parser.add_argument(
        "--job-fd", type=int, required=True, help="inherited descriptor that holds the device's job"
    )
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from coarse.proxy.device import run_device

    run_device(args.job_fd)
    return 0

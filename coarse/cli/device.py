"""`coarse device`: the entry point of a memory device process."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the sub-command."""
    parser = subparsers.add_parser(
        "device",
        help="run a memory device (sessions start theirs automatically)",
        description="Runs one memory device of a session. Sessions start these processes automatically and pass the "
        "job description of each through an inherited descriptor.",
    )
    parser.add_argument(
        "--job-fd", type=int, required=True, help="inherited descriptor with the device's job"
    )
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from coarse.proxy.device_process import run_device
    from coarse.startup.node_reconnection import Reconnection

    run_device(args.job_fd, Reconnection)
    return 0

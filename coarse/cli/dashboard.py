"""`coarse dashboard`: a page in the browser that shows a running job, or one that was recorded."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from coarse.cli.arguments import add_job, add_nodes, file_to_write, port_number
from coarse.dashboard.follower import Follower
from coarse.dashboard.history import History, Recorder, open_recording
from coarse.dashboard.other_nodes import WholeJob
from coarse.dashboard.sampler import Sampler
from coarse.errors import CoarseError
from coarse.status.address import find_addresses

if TYPE_CHECKING:  # of an extra
    from coarse.dashboard.server import Server

logger = logging.getLogger(__name__)

_DESCRIPTION = """\
Shows a running job of this node in your browser: workers, memory devices and the links between them with their
traffic, the parts of a step, slow workers, memory, checkpoints, events, routes and their reasons. It is served on
loopback, to those who know its URL, until Ctrl-C. `coarse run --dashboard` starts it with the job."""

_LAST_SAMPLE_S = 2.0
_POLL_S = 0.05


class NoJobError(CoarseError):
    """No job, or more than one, is meant."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `dashboard` to the `coarse` command."""
    parser = subparsers.add_parser("dashboard", help="show a job in the browser", description=_DESCRIPTION)
    add_job(parser)
    add_nodes(parser)
    parser.add_argument("--port", type=port_number, default=0, help="port on loopback (default: a free one)")
    parser.add_argument(
        "--record", type=file_to_write, metavar="FILE", help="also write the page's samples to FILE"
    )
    parser.add_argument("--open", type=Path, metavar="FILE", help="show a job that was recorded to FILE")
    parser.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)  # by coarse run
    parser.set_defaults(handler=run, usage_error=parser.error, extra="dashboard")


def run(arguments: argparse.Namespace) -> int:
    """Serves the page until it is told to end; returns 0."""
    from coarse.dashboard.server import Server

    fail: Callable[[str], NoReturn] = arguments.usage_error
    if arguments.open is not None:
        if arguments.job or arguments.nodes or arguments.record is not None:
            fail("--open shows a recorded job: give neither JOB nor --metrics nor --record")
        _serve(Server(open_recording(arguments.open), port=arguments.port, is_live=False))
        return 0
    job = arguments.job if arguments.launched else _the_job(arguments.job)
    history, sampler = History(), Sampler(job)
    recorder = None if arguments.record is None else Recorder(arguments.record)
    server = Server(history, port=arguments.port, is_live=True)
    follower = Follower(WholeJob(sampler, arguments.nodes).sample, history, recorder)
    if arguments.launched:
        attend = functools.partial(_attend_launcher, sampler, follower, server, history)
        threading.Thread(target=attend, name="coarse-dashboard-launcher", daemon=True).start()
    try:
        _serve(server)
    finally:
        follower.close()
    return 0


def _the_job(beginning: str) -> str:
    """The id of the job that is meant.

    Raises:
        NoJobError: If there is none, or more than one.
    """
    jobs = sorted({each.job for each in find_addresses(beginning)})
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        named = f"job {beginning}" if beginning else "job"
        raise NoJobError(f"no {named} of this user runs on this node")
    raise NoJobError(f"jobs {', '.join(jobs)} run on this node; name one of them: coarse dashboard JOB")


def _serve(server: Server) -> None:
    print(f"coarse dashboard: {server.url}", file=sys.stderr, flush=True)
    server.run()


def _attend_launcher(sampler: Sampler, follower: Follower, server: Server, history: History) -> None:
    """Takes the launcher's events from standard input; ends the server after the job, when pages know its end."""
    for line in sys.stdin.buffer:
        _take_event(sampler, line)
    follower.close()
    until_s = time.monotonic() + (_LAST_SAMPLE_S if server.pages.last_sent else 0.0)
    while server.pages.last_sent < history.last_number and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    server.close()


def _take_event(sampler: Sampler, line: bytes) -> None:
    try:
        event = json.loads(line)
        sampler.tell(event["kind"], event["text"])
    except (ValueError, TypeError, KeyError):  # a launcher that is killed may leave half a line
        logger.warning("an event of the launcher cannot be read: %r", line[:80])

"""`coarse top`: the essentials of a running job in the terminal, renewed while the job runs."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from coarse.cli.arguments import add_job, add_nodes, seconds
from coarse.cli.display.terminal import TerminalEvent, TerminalInput, suspend
from coarse.cli.main import ToldToEnd
from coarse.cli.status import by_job, say_which
from coarse.dashboard.other_nodes import WholeJob
from coarse.dashboard.sampler import Sampler
from coarse.dashboard.samples import JOB, RUNS, Event, Sample
from coarse.status.address import find_addresses
from coarse.status.requests import ask

if TYPE_CHECKING:  # slow to import
    from rich.console import Console

_DESCRIPTION = """\
Shows the bottlenecks of a running job of this node, renewed every second:
workers with their step times, slow ones marked, memory devices, links with
their traffic and capacity, and events. `q` or Ctrl-C ends it; it also ends with
the job. Without a terminal it prints once."""

_PLAIN_WIDTH = 160
_PLAIN_ROWS = 256
_KEPT_EVENTS = 5
_LINES_BESIDE_ROWS = 10 + _KEPT_EVENTS  # heading, headers, empty lines, who is slow, what is elsewhere
_NUM_TABLES = 3
_LEAST_ROWS = 2
_LEAST_INTERVAL_S = 0.1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `top` to the `coarse` command."""
    parser = subparsers.add_parser(
        "top",
        help="show steps, memory devices and links of a running job, renewed",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(parser)
    parser.add_argument(
        "--every",
        type=_interval,
        default=1.0,
        metavar="SECONDS",
        help="time between two readings (default: %(default)g)",
    )
    add_nodes(parser)
    parser.add_argument("--once", action="store_true", help="print one reading, and end")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Shows the only job that is meant, or lists the jobs; returns 1 if there is no such job."""
    jobs = by_job(ask(find_addresses(arguments.job)))
    if len(jobs) != 1:
        return say_which("top", arguments.job, jobs)
    (job,) = jobs
    events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
    samples = _samples(WholeJob(Sampler(job), arguments.nodes), events)
    if arguments.once or not sys.stdout.isatty():
        return _print_once(samples, events, job, arguments.every)
    from coarse.cli.display.top_view import describe_event

    if _show(samples, events, arguments.every):
        print("\n".join([f"coarse top: job {job} has ended", *map(describe_event, events)]))
    return 0


def _interval(text: str) -> float:
    if (interval_s := seconds(text)) < _LEAST_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text!r} is less than {_LEAST_INTERVAL_S:g} s")
    return interval_s


def _samples(job: WholeJob, events: deque[Event]) -> Iterator[Sample]:
    """Samples of a job while it runs on this node.

    Args:
        job: The job.
        events: Receives the events of the job. The first sample knows of no change.
    """
    is_first = True
    while True:
        sample = job.sample()
        events.extend(each for each in sample.events if not (is_first and each.kind == JOB))
        is_first = False
        if sample.phase != RUNS:
            return
        yield sample


def _print_once(samples: Iterator[Sample], events: Sequence[Event], job: str, every_s: float) -> int:
    """Prints the second sample, because rates need two."""
    from rich.console import Console

    from coarse.cli.display.top_view import view

    first = next(samples, None)
    time.sleep(every_s)
    sample = next(samples, first)
    if sample is None:
        print(f"coarse top: job {job} has ended", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
    console.print(view(sample, events, most_rows=_PLAIN_ROWS))
    return 0


def _show(samples: Iterator[Sample], events: Sequence[Event], every_s: float) -> bool:
    """Renews the screen until the job ends; False if the user presses q or Ctrl-C before."""
    try:
        while (event := _fill_screen(samples, events, every_s)) in (
            TerminalEvent.SUSPEND,
            TerminalEvent.CONTINUED,
        ):
            if event is TerminalEvent.SUSPEND:
                suspend()
    except ToldToEnd:
        raise
    except KeyboardInterrupt:
        return False
    return event is not TerminalEvent.QUIT


def _fill_screen(samples: Iterator[Sample], events: Sequence[Event], every_s: float) -> TerminalEvent:
    """Renews the screen until the job ends, or the user or the terminal says that it must be left."""
    from rich.console import Console
    from rich.live import Live

    from coarse.cli.display.top_view import view

    console = Console(highlight=False)
    with TerminalInput("q") as terminal, Live(console=console, screen=True, auto_refresh=False) as live:
        for sample in samples:
            live.update(view(sample, events, most_rows=_most_rows(console)), refresh=True)
            if (event := terminal.wait(every_s)) not in (TerminalEvent.NOTHING, TerminalEvent.RESIZED):
                return event
    return TerminalEvent.NOTHING


def _most_rows(console: Console) -> int:
    return max(_LEAST_ROWS, (console.height - _LINES_BESIDE_ROWS) // _NUM_TABLES)

"""COARSE, torch DDP over gloo, and MPICH over several nodes: a training step and an all-reduce, in one table.

    sudo python benchmarks/nodes.py [--rates 1gbit,10gbit] [--delays 0.1,5,25] [--losses 0,0.1] [--nodes 2,3,4]
        [--workers 1,2] [--sizes 1MiB,25MiB,100MiB] [--operations step,all_reduce] [--systems ...] [--rounds 3]
        [--results FILE] [--write]

The nodes are network namespaces of this machine, whose cables have a rate, a delay and loss (node_network.py). A step
has gradients of the size in float32 and little to compute. Each system is verified before it is timed; systems take
turns, and a figure is the median of the medians of the rounds, with the least and the largest in brackets. *Limit* is
the time that a cable takes for the bytes that a node must send and receive, at the rate of plain sockets between all
nodes just before. A verdict compares with the aims in node_table.py. What FILE has of this commit and machine is not
measured again, and is in the table, too; `--write` puts it into docs/benchmarks.md. All figures are *emulated*.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from node_contest import Pools, compare, measure_link
from node_network import Link, Networks
from node_plan import Case, Cell, Key, Plan, is_known, read_records
from node_systems import ALL_REDUCE, DEFAULT, STEP, SYSTEMS, missing
from node_table import Record, limit_ms, table, times, verdict, write_document
from tables import ROOT

from coarse.bench.harness.job_memory import require_memory
from coarse.bench.provenance import EMULATED, Provenance, append_records
from coarse.errors import CoarseError
from coarse.settings import parse_bytes

_COPIES_PER_WORKER = 6  # of the gradients
_PROCESS_BYTES = 600 << 20  # of one worker of every system


def measure(plan: Plan, networks: Networks, path: Path, origin: Provenance) -> dict[Key, Record]:
    """Measures the cases that the file does not have, and appends them to it.

    A cell that cannot be measured is left out with a word. Returns all records of the file, by their cases.
    """
    records = read_records(path, origin)
    cases = plan.cases()
    left = [case for case in cases if not is_known(case, plan, records)]
    print(f"{len(left)} comparisons; {path} has {len(cases) - len(left)} more of this commit", flush=True)
    progress = Progress(len(left))

    def keep(case: Case, record: Record) -> None:
        append_records(path, [record], origin, kind=EMULATED)
        records[case.key] = {**record, **asdict(origin)}
        progress.tell(case, record)

    for cell, some in itertools.groupby(left, key=lambda case: case.cell):
        try:
            measure_cell(cell, list(some), plan, networks, keep)
        except CoarseError as error:
            print(f"{cell}: {error}", file=sys.stderr, flush=True)
    return records


def measure_cell(
    cell: Cell, cases: Sequence[Case], plan: Plan, networks: Networks, keep: Callable[[Case, Record], None]
) -> None:
    """Measures some cases of a cell; `keep` gets each one's record."""
    with networks.nodes(cell.link, cell.nodes) as namespaces:
        conditions = {**measure_link(namespaces), "delay_by": networks.delay_of(cell.link)}
        with Pools(cell, namespaces) as pools:
            for case in cases:
                keep(case, compare(case, plan, pools, conditions))


class Progress:
    """Prints a line a comparison, with what is left."""

    def __init__(self, num_cases: int) -> None:
        self._num_cases = num_cases
        self._num_done = 0
        self._begin_s = time.monotonic()

    def tell(self, case: Case, record: Record) -> None:
        """A comparison has ended."""
        self._num_done += 1
        left_s = (time.monotonic() - self._begin_s) / self._num_done * (self._num_cases - self._num_done)
        left = f"{self._num_done} of {self._num_cases}, about {_duration(left_s)} left"
        figures = ", ".join(f"{title} {text}" for title, text in times(record).items() if text)
        print(f"[{left}] {case}, ms: {figures}; limit {limit_ms(record):.3g}: {verdict(record)}", flush=True)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


# ---- command ----


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rates", type=_list_of(str), default=["1gbit", "10gbit"], help="of the cables, in tc's notation")
    add("--delays", type=_list_of(float), default=[0.1, 5.0, 25.0], help="round trips in ms")
    add("--losses", type=_list_of(float), default=[0.0, 0.1], help="lost frames in percent")
    add("--nodes", type=_list_of(int), default=[2, 3, 4])
    add("--workers", type=_list_of(int), default=[1, 2], help="on each node")
    add(
        "--sizes", type=_list_of(parse_bytes), default=[1 << 20, 25 << 20, 100 << 20], help="of the gradients"
    )
    add("--operations", type=_list_of(str), default=[STEP, ALL_REDUCE], help=f"{STEP}, {ALL_REDUCE}")
    add("--systems", type=_list_of(str), default=list(DEFAULT), help=", ".join(SYSTEMS))
    add("--rounds", type=int, default=3)
    add("--budget", type=float, default=1.0, help="seconds of a system's turn, about")
    add("--results", type=Path, default=ROOT / "runs" / "nodes.jsonl", metavar="FILE", help="JSON lines")
    add("--write", action="store_true", help="also rewrite the table in docs/benchmarks.md")
    return parser.parse_args(words)


def _list_of(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def read_list(text: str) -> list[Any]:
        return [read(each) for each in text.split(",")]

    read_list.__name__ = f"list of {read.__name__}"
    return read_list


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan of a command line, without the systems that cannot run here.

    Raises:
        ValueError: If a value is out of range, or no system is left.
    """
    links = itertools.product(arguments.rates, arguments.delays, arguments.losses)
    plan = Plan(
        links=tuple(Link(rate=rate, delay_ms=delay, loss_percent=loss) for rate, delay, loss in links),
        nodes=tuple(arguments.nodes),
        workers=tuple(arguments.workers),
        sizes=tuple(arguments.sizes),
        operations=tuple(arguments.operations),
        systems=tuple(arguments.systems),
        rounds=arguments.rounds,
        budget_s=arguments.budget,
    )
    lacking = {system: reason for system in plan.systems if (reason := missing(system))}
    for reason in lacking.values():
        print(reason, file=sys.stderr)
    return dataclasses.replace(plan, systems=tuple(each for each in plan.systems if each not in lacking))


def check_memory(plan: Plan) -> None:
    """Refuses a plan that cannot fit.

    Raises:
        BenchError: If too little memory is available.
    """
    num_workers = max(plan.nodes) * max(plan.workers)
    needed_bytes = num_workers * (_PROCESS_BYTES + _COPIES_PER_WORKER * max(plan.sizes))
    require_memory(
        needed_bytes, f"{num_workers} workers of each system may need", "Choose fewer --nodes or --sizes."
    )


def end_at_signals() -> None:
    """Makes signals that end this process remove namespaces and processes first."""

    def end(number: int, _: object) -> None:
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end)


def main() -> int:
    arguments = parse()
    end_at_signals()
    try:
        plan = plan_of(arguments)
        check_memory(plan)
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            networks = Networks(plan.links, Path(folder))
            records = measure(plan, networks, arguments.results, Provenance.here())
    except (CoarseError, OSError, ValueError) as error:
        print(f"nodes.py: {error}", file=sys.stderr)
        return 1
    if records:
        print("\n".join(table(list(records.values()))))
        if arguments.write:
            write_document(list(records.values()))
    return 0 if all(case.key in records for case in plan.cases()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How long it takes until a new worker contributes, and how long the others stand still for it.

    python benchmarks/new_worker.py [--model bert-base] [--workers 3] [--rounds 3]

`coarse run --on-loss replace` trains with the optimizer in the memory devices, or by `--plain` on the workers. There,
a new worker gets parameters and states from another one. Worker 1 is killed by SIGKILL, and a new worker takes its
place. *ready* is the time from the end of its imports and of building its model and optimizer to the end of its first
step. The others' steps are those that ended before the kill (*median*, *p99*), while the new worker started
(*starting*, when it uses a core for its imports) and from its model to its first step (*entering*). All figures are
measured.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic import (
    LIMIT_S,
    VICTIM,
    WARM_UP,
    JobFailedError,
    Plan,
    Step,
    failure,
    in_ms,
    kill_the_victim,
    parser_of_plans,
    read_steps,
    start,
)
from rich.console import Console
from rich.table import Table

from coarse.bench.provenance import Provenance, append_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How a new worker entered one job. Times in seconds; steps are those of the others."""

    median_s: float
    p99_s: float
    starting_s: float
    entering_s: float
    ready_s: float

    @property
    def over_p99_s(self) -> float:
        """How much longer the longest step while it entered was than the 99th percentile before the kill."""
        return self.entering_s - self.p99_s


def run_job(plan: Plan, system: str) -> Entry:
    """Runs a job, kills its worker 1, and reads what the others and the new worker saw.

    Raises:
        JobFailedError: If the job does not come to its end.
    """
    flags = ["-n", str(plan.workers), "--min-workers", str(plan.workers - 1), "--on-loss", "replace"]
    command = [sys.executable, "-m", "coarse", "run", *flags, "--max-restarts", "1"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = start([*command, *plan.command(system, folder)], folder)
        try:
            killed_s = kill_the_victim(folder, plan)
            if job.wait(LIMIT_S):
                raise failure(folder, f"the job failed with exit code {job.returncode}")
        finally:
            job.kill()
        others = [read_steps(folder, place) for place in range(plan.workers) if place != VICTIM]
        new = [step for step in read_steps(folder, VICTIM) if step.began_s > killed_s]
        built_s = float((folder / f"built-{VICTIM}").read_text())
        if not new or built_s < killed_s:
            raise failure(folder, "no new worker took part")
        return summarise(others, killed_s, built_s, new[0])


def summarise(others: list[list[Step]], killed_s: float, built_s: float, first: Step) -> Entry:
    """Figures of one job; `first` is the new worker's first step."""
    steps = [step for each in others for step in each[WARM_UP:]]
    before = [step.seconds for step in steps if step.ended_s < killed_s]
    starting = [step.seconds for step in steps if killed_s < step.began_s and step.ended_s < built_s]
    entering = [step.seconds for step in steps if step.ended_s >= built_s and step.began_s <= first.ended_s]
    return Entry(
        median_s=statistics.median(before),
        p99_s=statistics.quantiles(before, n=100)[98],
        starting_s=max(starting),
        entering_s=max(entering),
        ready_s=first.ended_s - built_s,
    )


def print_table(plan: Plan, entries: list[Entry], console: Console) -> None:
    """Medians over the rounds, and the worst round."""
    table = Table(
        title=f"A new worker among {plan.workers}, {plan.model}; longest steps of the others; ms, median (worst)"
    )
    columns = {
        "median step": "median_s",
        "p99": "p99_s",
        "starting": "starting_s",
        "entering": "entering_s",
        "over p99": "over_p99_s",
        "ready": "ready_s",
    }
    for column in columns:
        table.add_column(column, justify="right")
    table.add_row(*(in_ms([getattr(entry, name) for entry in entries]) for name in columns.values()))
    console.print(table)


def main() -> None:
    parser = parser_of_plans(__doc__ or "")
    parser.add_argument("--plain", action="store_true", help="the optimizer runs on the workers")
    arguments = parser.parse_args()
    console = Console(width=110)
    names = ("model", "batch", "sequence", "workers", "before")
    plan = Plan(**{name: getattr(arguments, name) for name in names}, after=0)
    system = "coarse-replace-plain" if arguments.plain else "coarse-replace"
    entries = []
    for number in range(arguments.rounds):
        try:
            entries.append(run_job(plan, system))
        except JobFailedError as error:
            sys.exit(str(error))
        console.print(f"round {number + 1}: {entries[-1]}", highlight=False)
    print_table(plan, entries, console)
    if arguments.json is not None:
        append_records(
            arguments.json,
            [{"system": system, **asdict(plan), **asdict(entry)} for entry in entries],
            Provenance.here(),
        )


if __name__ == "__main__":
    main()

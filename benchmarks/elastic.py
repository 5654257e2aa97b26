"""How long the others stand still when a worker is killed: COARSE, torchft and torch elastic, in turns.

    python benchmarks/elastic.py [--model digits bert-small] [--workers 2 4] [--rounds 3] [--systems coarse torchft]

In each round the systems take turns, for each model and number of workers. Their jobs train the same model on the
same random batches with AdamW. When worker 1 has made `--before` steps, it is killed by SIGKILL, at a random moment
of a step. Each survivor's clock gives its median step and the 99th percentile before the kill, its longest step after
it, and the time from the kill to the end of its next step that counted. Steps that did not count are lost. All
figures are measured. torchft is a package of its own (`pip install torchft`), and is left out with a word where it is
missing. A job that fails is reported and left out, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from coarse.bench.provenance import Provenance, append_records

SYSTEMS = {"coarse": "COARSE", "torchft": "torchft", "torchrun": "torch DDP, torchrun"}
WORKER = Path(__file__).with_name("elastic_workers.py")
VICTIM = 1
WARM_UP = 20
"""Steps at the start that count for nothing."""

LIMIT_S = 600.0
POLL_S = 0.005
JOIN_TIMEOUT_MS = 1000
"""Of torchft's lighthouse."""


class JobFailedError(Exception):
    """A job ended in another way than it should; the message ends with its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The samples of a worker in a step, and the steps before and after the kill."""

    batch: int
    before: int
    after: int


SIZES = {"digits": Size(batch=16, before=300, after=300)}
LARGE = Size(batch=1, before=100, after=40)
"""Of all other models, unless the command line says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The job that all systems run."""

    model: str
    batch: int
    sequence: int
    workers: int
    before: int
    after: int

    def command(self, system: str, folder: Path) -> list[str]:
        """The command line of one worker, without its launcher."""
        shape = {"model": self.model, "batch": self.batch, "sequence": self.sequence}
        shape |= {"last-step": self.before + self.after, "min-workers": self.workers - 1}
        flags = [f"--{name}={value}" for name, value in shape.items()]
        return [str(WORKER), system, f"--folder={folder}", *flags]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of one worker; seconds of the monotonic clock."""

    number: int
    began_s: float
    ended_s: float
    counted: bool

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the survivors of one job saw. Times in seconds."""

    system: str
    median_s: float
    p99_s: float
    longest_s: float
    next_step_s: float
    lost_steps: int

    @property
    def over_p99_s(self) -> float:
        """How much longer the longest step after the kill was than the 99th percentile before it."""
        return self.longest_s - self.p99_s


def launch_coarse(plan: Plan, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`coarse run` of this checkout."""
    flags = ["-n", str(plan.workers), "--min-workers", str(plan.workers - 1)]
    yield [start([sys.executable, "-m", "coarse", "run", *flags, *plan.command("coarse", folder)], folder)]


def launch_torchrun(plan: Plan, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """torchrun, which may restart its workers once.

    With the agent's store shared, as by default, new workers now and then connect to the ports of those that have
    ended, and fail: https://github.com/pytorch/pytorch/issues/135712.
    """
    flags = ["--standalone", f"--nproc-per-node={plan.workers}", "--max-restarts=1", "--monitor-interval=0.1"]
    module = [sys.executable, "-m", "torch.distributed.run", *flags]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    yield [start([*module, *plan.command("torchrun", folder)], folder, environment)]


def launch_torchft(plan: Plan, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """torchft's lighthouse in this process, and a process a replica."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=plan.workers - 1, join_timeout_ms=JOIN_TIMEOUT_MS
    )
    command = [sys.executable, *plan.command("torchft", folder)]
    environment = {"TORCHFT_LIGHTHOUSE": lighthouse.address()}
    yield [start([*command, f"--place={place}"], folder, environment) for place in range(plan.workers)]
    lighthouse.shutdown()


def start(
    command: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a process whose output goes into the job's file."""
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )


LAUNCHERS = {
    "coarse": contextmanager(launch_coarse),
    "torchft": contextmanager(launch_torchft),
    "torchrun": contextmanager(launch_torchrun),
}


def run_job(system: str, plan: Plan) -> Outcome:
    """Runs a job, kills its worker 1, and reads what the others saw.

    Raises:
        JobFailedError: If the job does not come to its end.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = stack.enter_context(LAUNCHERS[system](plan, folder))
        try:
            killed_s = kill_the_victim(folder, plan)
            for process in processes:
                process.wait(LIMIT_S)
        except (subprocess.TimeoutExpired, TimeoutError):
            raise failure(folder, f"{SYSTEMS[system]} took longer than {LIMIT_S:g} s") from None
        finally:
            for process in processes:
                process.kill()
        survivors = [place for place in range(plan.workers) if place != VICTIM]
        steps = {place: read_steps(folder, place) for place in survivors}
        if any(not each or each[-1].number < plan.before + plan.after - 1 for each in steps.values()):
            raise failure(folder, f"{SYSTEMS[system]}: survivors did not come to their last step")
        return summarise(system, list(steps.values()), killed_s)


def failure(folder: Path, reason: str) -> JobFailedError:
    """The error, with the end of the job's output."""
    lines = (folder / "output").read_text(errors="replace").splitlines()
    return JobFailedError("\n".join([reason, *lines[-30:]]))


def kill_the_victim(folder: Path, plan: Plan) -> float:
    """Waits until worker 1 has made its steps, kills it, and returns when.

    Raises:
        TimeoutError: If it does not get so far.
    """
    until_s = time.monotonic() + LIMIT_S
    while len(steps := read_steps(folder, VICTIM)) < plan.before:
        if time.monotonic() > until_s:
            raise TimeoutError
        time.sleep(POLL_S)
    time.sleep(random.uniform(0, statistics.median(step.seconds for step in steps)))
    killed_s = time.monotonic()
    os.kill(int((folder / f"pid-{VICTIM}").read_text()), signal.SIGKILL)
    return killed_s


def read_steps(folder: Path, place: int) -> list[Step]:
    """The steps of a worker so far; a line that is being written is left out."""
    path = folder / f"steps-{place}.jsonl"
    if not path.exists():
        return []
    return [
        Step(*json.loads(line)) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


def summarise(system: str, survivors: list[list[Step]], killed_s: float) -> Outcome:
    """The survivors' figures; of each, that of the survivor who had it worst."""
    before = [step.seconds for steps in survivors for step in steps[WARM_UP:] if step.ended_s < killed_s]
    return Outcome(
        system=system,
        median_s=statistics.median(before),
        p99_s=statistics.quantiles(before, n=100)[98],
        longest_s=max(longest_wait(steps, killed_s) for steps in survivors),
        next_step_s=max(next_counted(steps, killed_s) - killed_s for steps in survivors),
        lost_steps=max(sum(not step.counted for step in steps) for steps in survivors),
    )


def longest_wait(steps: list[Step], killed_s: float) -> float:
    """The longest time between the ends of two steps after the kill: a restart of the process is part of it."""
    ends = [step.ended_s for step in steps]
    return max(later - earlier for earlier, later in itertools.pairwise(ends) if later > killed_s)


def next_counted(steps: list[Step], killed_s: float) -> float:
    """When the first step that began before the kill, or after it, ended after it and counted."""
    return min(step.ended_s for step in steps if step.ended_s > killed_s and step.counted)


def chosen(systems: list[str], console: Console) -> list[str]:
    """Those that are installed."""
    if "torchft" in systems and importlib.util.find_spec("torchft") is None:
        console.print("torchft: not installed, left out. To get it: pip install torchft")
        return [system for system in systems if system != "torchft"]
    return systems


def print_table(plan: Plan, outcomes: list[Outcome], console: Console) -> None:
    """A row a system: medians over the rounds, and the worst round."""
    job = f"{plan.model}, batch {plan.batch}"
    title = f"SIGKILL of one of {plan.workers} workers, {job}; ms, median of rounds (worst)"
    table = Table(title=title)
    for name in ("system", "median step", "p99", "longest after", "over p99", "next step", "steps lost"):
        table.add_column(name, justify="left" if name == "system" else "right")
    for system in dict.fromkeys(outcome.system for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.system == system]
        columns = ("median_s", "p99_s", "longest_s", "over_p99_s", "next_step_s")
        times = [in_ms([getattr(outcome, column) for outcome in mine]) for column in columns]
        table.add_row(SYSTEMS[system], *times, str(max(outcome.lost_steps for outcome in mine)))
    console.print(table)


def in_ms(seconds: list[float]) -> str:
    worst = f" ({max(seconds) * 1e3:.0f})" if len(seconds) > 1 else ""
    return f"{statistics.median(seconds) * 1e3:.1f}{worst}"


def parser_of_plans(description: str, *, several: bool = False) -> argparse.ArgumentParser:
    """Reads what all jobs of a benchmark share; `several` models and numbers of workers, or one of each."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = "+" if several else None
    parser.add_argument("--model", nargs=number, default=["digits"] if several else "digits")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--workers", type=int, nargs=number, default=[3] if several else 3)
    parser.add_argument("--before", type=int, default=300, help="steps before the kill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="append a record a job")
    return parser


def plans_of(arguments: argparse.Namespace) -> list[Plan]:
    """A plan for each model and number of workers; a model's own size where the command line gives none."""
    given = {name: getattr(arguments, name) for name in ("batch", "before", "after")}
    given = {name: value for name, value in given.items() if value is not None}
    return [
        Plan(
            model=model,
            workers=workers,
            sequence=arguments.sequence,
            **{**asdict(SIZES.get(model, LARGE)), **given},
        )
        for model in arguments.model
        for workers in arguments.workers
    ]


def parse_arguments() -> argparse.Namespace:
    parser = parser_of_plans(__doc__ or "", several=True)
    parser.add_argument("--after", type=int, help="steps after it")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.set_defaults(batch=None, before=None)
    arguments = parser.parse_args()
    if min(arguments.workers) < 2:
        parser.error("--workers: one is killed and others go on, so a job needs two or more")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=110)
    outcomes: dict[Plan, list[Outcome]] = {plan: [] for plan in plans_of(arguments)}
    num_failed = 0
    for number, plan in itertools.product(range(arguments.rounds), outcomes):
        for system in chosen(arguments.systems, console):
            name = f"round {number + 1}: {plan.model}, {plan.workers} workers: {SYSTEMS[system]}"
            try:
                outcome = run_job(system, plan)
            except JobFailedError as error:
                num_failed += 1
                console.print(f"{name}: {error}", highlight=False, markup=False)
                continue
            outcomes[plan].append(outcome)
            console.print(f"{name}: {outcome}", highlight=False, markup=False)
            if arguments.json is not None:
                append_records(arguments.json, [asdict(plan) | asdict(outcome)], Provenance.here())
    for plan, of_plan in outcomes.items():
        print_table(plan, of_plan, console)
    if num_failed:
        sys.exit(f"{num_failed} job(s) failed and are in no table")


if __name__ == "__main__":
    main()

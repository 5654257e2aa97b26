"""Elastic: digits are trained while workers are killed and replaced, under COARSE, torchft and torch elastic.

    python -m experiments elastic
    python -m experiments.elastic.run --seconds 600 --kill-every 15 --workers 2 --systems coarse --results FOLDER

Each system trains the same model on the same batches with AdamW. In each interval a worker gets SIGKILL at a random
moment, the same in all systems, and its launcher starts another one. Real processes on this machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.elastic import SYSTEMS
from coarse.profiler.figures import COLOURS
from coarse.profiler.profile import MEASURED
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.elastic.goodput import (
    JobLog,
    goodput,
    goodputs,
    longest_standstill,
    lost_steps,
    rate_per_worker,
    throughput,
    world_sizes,
)
from experiments.elastic.jobs import Plan, run_job
from experiments.expectation import AIM, Check, Expectation, Measured, NumberCheck, judge_number
from experiments.quiet import measure_in_quiet, require_quiet

COARSE = "coarse"
FULL = Plan()
QUICK = Plan(calm_s=3, seconds=12, kill_every_s=8)

ACCURACY = Expectation(what="test accuracy", low=97, high=100, unit="%", source=AIM)
GOODPUT = Expectation(what="goodput", low=95, high=105, unit="%", source=AIM)
NONE_LOST = Expectation(what="steps lost", low=0, high=0, source=AIM)
NO_BETTER = Expectation(what="goodput", low=0, high=100, unit="% of COARSE's", source=AIM)

T = TypeVar("T")

_INTERVAL_S = 1.0  # of the picture
_ATTEMPTS = 2  # of a job of five minutes beside other work


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A system's figures.

    Args:
        log: What its workers did while they were killed.
        rates: Samples per second of one worker without kills, by the number of workers.
    """

    log: JobLog
    rates: Mapping[int, float]

    @property
    def goodput(self) -> float:
        """Per cent, as goodput() defines it."""
        return 100 * goodput(self.log, self.rates)

    def goodput_over(self, interval_s: float) -> Measured:
        """The goodput in per cent, with the range of that of single intervals, each at least 0.1."""
        every = (goodput(self.log, self.rates), *goodputs(self.log, self.rates, interval_s))
        percents = [max(0.1, 100 * each) for each in every]
        return Measured(value=percents[0], low=min(percents), high=max(percents))

    @property
    def goodput_by_rate_of_all(self) -> float:
        """Per cent, as if workers were as fast while one is missing as when all are there."""
        return 100 * goodput(self.log, {self.log.workers: self.rates[self.log.workers]})

    @property
    def samples_per_s(self) -> float:
        """Useful samples per second."""
        rates = throughput(self.log, _INTERVAL_S)
        return sum(rates) / len(rates)


class Measure(Protocol):
    """Calls a function while no other work takes the processors, and returns its result."""

    def __call__(self, what: str, measure: Callable[[], T]) -> T: ...


def measure(system: str, plan: Plan, in_quiet: Measure) -> Run:
    """Runs a job with kills, and one with a worker less and without kills, for its rate."""
    fewer = plan.workers - 1
    job = partial(run_job, system, plan)
    log, rate = in_quiet(
        f"{SYSTEMS[system]}, {plan.seconds:g} s with {len(plan.kills())} kills",
        lambda: job(workers=plan.workers, kills=plan.kills(), seconds=plan.seconds),
    )
    calm, _ = in_quiet(
        f"{SYSTEMS[system]}, {fewer} worker(s) without kills",
        lambda: job(workers=fewer, kills=(), seconds=plan.calm_s),
    )
    rate_of_fewer = rate_per_worker(calm, calm.began_s, calm.ended_s)
    return Run(log=log, rates={plan.workers: rate, fewer: rate_of_fewer})


def run_plan(plan: Plan, options: Options) -> Outcome:
    """Runs all systems of the plan that are installed, one after the other.

    Raises:
        BusyMachineError: If other work takes the processors, unless it is a quick run.
    """

    def in_quiet(what: str, measure: Callable[[], T]) -> T:
        options.progress(what)
        if options.is_quick:
            return measure()
        require_quiet(what)
        return measure_in_quiet(what, measure, attempts=_ATTEMPTS)

    runs = {system: measure(system, plan, in_quiet) for system in _installed(plan.systems, options.progress)}
    return Outcome(
        findings=[_finding(plan, system, runs) for system in runs],
        data=[_data(plan, system, run) for system, run in runs.items()],
        pictures={"churn": draw(plan, runs)},
    )


def _installed(systems: Sequence[str], progress: Callable[[str], None]) -> list[str]:
    if "torchft" in systems and importlib.util.find_spec("torchft") is None:
        progress("torchft: not installed, left out. To get it: pip install torchft")
        return [system for system in systems if system != "torchft"]
    return list(systems)


def _finding(plan: Plan, system: str, runs: Mapping[str, Run]) -> Finding:
    run = runs[system]
    more = [] if system == COARSE else [f"goodput {run.goodput:.1f}%", f"{lost_steps(run.log)} steps lost"]
    notes = [
        f"{len(run.log.absences)} killed",
        *more,
        f"goodput by the rate of {plan.workers} workers alone {run.goodput_by_rate_of_all:.1f}%",
        f"{run.samples_per_s:.0f} samples/s",
        f"at most {longest_standstill(run.log):.2f} s without a step",
    ]
    return Finding(
        ran=f"digits, {plan.workers} workers, SIGKILL of one about every {plan.kill_every_s:g} s for "
        f"{plan.seconds:g} s, {SYSTEMS[system]}",
        checks=_checks(plan, system, runs),
        note="; ".join(notes),
        kind=MEASURED,
    )


def _checks(plan: Plan, system: str, runs: Mapping[str, Run]) -> tuple[Check, ...]:
    """The range of goodput is that of the intervals in each of which one worker is killed."""
    run = runs[system]
    accuracy = judge_number(ACCURACY, 100 * run.log.accuracy)
    goodput_of_run = run.goodput_over(plan.kill_every_s)
    if system == COARSE:
        lost = judge_number(NONE_LOST, lost_steps(run.log))
        return accuracy, NumberCheck(expectation=GOODPUT, measured=goodput_of_run), lost
    if COARSE not in runs:
        return (accuracy,)
    ratio = goodput_of_run.over(runs[COARSE].goodput_over(plan.kill_every_s)).times(100)
    return accuracy, NumberCheck(expectation=NO_BETTER, measured=ratio)


def _data(plan: Plan, system: str, run: Run) -> dict[str, Any]:
    log = run.log
    return {
        "kind": MEASURED,
        **asdict(plan),
        "system": system,
        "accuracy": log.accuracy,
        "goodput": run.goodput / 100,
        "goodput_by_rate_of_all": run.goodput_by_rate_of_all / 100,
        "samples_per_s": run.samples_per_s,
        "rates": dict(run.rates),
        "lost_steps": lost_steps(log),
        "longest_standstill_s": longest_standstill(log),
        "kills": [
            {
                "place": each.place,
                "at_s": each.killed_s - log.began_s,
                "absent_s": each.ready_s - each.killed_s,
            }
            for each in log.absences
        ],
        "throughput": throughput(log, _INTERVAL_S),
        "world_sizes": world_sizes(log, _INTERVAL_S),
    }


def draw(plan: Plan, runs: Mapping[str, Run]) -> Figure:
    """Throughput and number of workers over time, a row a system; ticks at the top are kills."""
    figure = Figure(figsize=(8, 1.2 + 1.5 * len(runs)), layout="constrained")
    rows = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (system, run), colour in zip(rows, runs.items(), COLOURS, strict=False):
        _draw_run(axes, run, colour)
        axes.set_title(f"{SYSTEMS[system]}: goodput {run.goodput:.0f}%", fontsize=10, loc="left")
    rows[-1].set_xlabel("seconds")
    title = f"Digits, {plan.workers} workers, one killed about every {plan.kill_every_s:g} s ({MEASURED})"
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_run(axes: Axes, run: Run, colour: str) -> None:
    rates = throughput(run.log, _INTERVAL_S)
    edges = [number * _INTERVAL_S for number in range(len(rates) + 1)]
    axes.stairs(rates, edges, fill=True, color=colour, alpha=0.6)
    axes.set_ylabel("samples/s")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    workers = axes.twinx()
    workers.stairs(world_sizes(run.log, _INTERVAL_S), edges, baseline=None, color="black", linewidth=1)
    workers.set_ylabel("workers")
    workers.set_ylim(0, run.log.workers + 1)
    workers.set_yticks(range(run.log.workers + 1))
    kills = [each.killed_s - run.log.began_s for each in run.log.absences]
    workers.plot(kills, [run.log.workers + 0.6] * len(kills), "v", color="black", markersize=4)


def parse_plan(arguments: Sequence[str]) -> tuple[Plan, list[str]]:
    """The plan that the command line asks for, and the rest of its arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.elastic.run",
        description="Trains digits while workers are killed and replaced, under each system in turn.",
        epilog="Any other option is one of every experiment: --quick, --results FOLDER.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=FULL.seconds, help="with kills")
    add(
        "--calm",
        type=float,
        default=FULL.calm_s,
        dest="calm_s",
        help="seconds without, for the rates of workers",
    )
    add("--kill-every", type=float, default=FULL.kill_every_s, dest="kill_every_s", help="seconds, about")
    add("--workers", type=int, default=FULL.workers, help="in the job")
    add("--systems", nargs="+", choices=SYSTEMS, default=FULL.systems, help="in this order")
    add("--preload", default=FULL.preload, help="modules that COARSE's workers need not import")
    chosen, rest = parser.parse_known_args(arguments)
    plan = replace(FULL, **{**vars(chosen), "systems": tuple(chosen.systems)})
    if plan != FULL and "--results" not in rest:
        parser.error(
            "the results in the tables are of the plan itself; say with --results FOLDER where these go"
        )
    return plan, rest


def run(options: Options) -> Outcome:
    """Runs all systems."""
    return run_plan(QUICK if options.is_quick else FULL, options)


EXPERIMENT = Experiment(
    name="elastic",
    figure="Elastic",
    machines=("host",),
    assumption="this machine's processors, on which new workers start beside those that train",
    minutes=20,
    run=run,
)

if __name__ == "__main__":
    chosen_plan, others = parse_plan(sys.argv[1:])
    experiment = replace(EXPERIMENT, run=lambda options: run_plan(chosen_plan, options))
    sys.exit(main(EXPERIMENT if chosen_plan == FULL else experiment, others))

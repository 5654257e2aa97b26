"""Options of `coarse simulate` for stragglers, slow links, jitter and failures, and the tables of their cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coarse.cli.display.tables import print_table

if TYPE_CHECKING:  # slow to import; `coarse --help` must not load these
    from coarse.simulator.faults.disturbances import Disturbances, Jitter
    from coarse.simulator.faults.goodput import Goodput, Recovery
    from coarse.simulator.faults.jittered import StepTimes
    from coarse.simulator.training_step import StepResult


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the parser of `coarse simulate`."""
    group = parser.add_argument_group("stragglers, slow links, jitter, failures (docs/simulator/failures.md)")
    group.add_argument(
        "--straggler",
        action="append",
        type=_worker_and_factor,
        default=[],
        metavar="WORKER=FACTOR",
        help="a worker that computes this many times longer; may be given again",
    )
    group.add_argument(
        "--slow-link",
        action="append",
        type=_link_and_factor,
        default=[],
        metavar="LINK=FACTOR",
        help="a link, by its name in the table of links, with so many times less bandwidth; may be given again",
    )
    group.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        metavar="V",
        help="standard deviation of a worker's time of computation, over its mean: 0.1 for a tenth; default: 0",
    )
    group.add_argument(
        "--steps", type=int, default=20, metavar="N", help="steps with jitter; default: %(default)s"
    )
    group.add_argument(
        "--failures",
        type=_hours,
        default=(),
        metavar="HOURS[,HOURS]",
        help="mean time between failures of one worker or memory device, for goodput with each recovery",
    )
    group.add_argument(
        "--restart-s",
        type=float,
        metavar="S",
        help="time until restarted processes train again, without reading state; default: 7.5, as measured with "
        "2 workers on one machine",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of jitter and failures; default: %(default)s"
    )


def disturbances(arguments: argparse.Namespace) -> Disturbances:
    """Stragglers and slow links.

    Raises:
        ValueError: If a factor is impossible.
    """
    from coarse.simulator.faults.disturbances import Disturbances

    return Disturbances(slow_workers=dict(arguments.straggler), slow_links=dict(arguments.slow_link))


def jitter(arguments: argparse.Namespace) -> Jitter | None:
    """The jitter; None without any.

    Raises:
        ValueError: If it is impossible.
    """
    from coarse.simulator.faults.disturbances import Jitter

    if not arguments.jitter:
        return None
    return Jitter(variation=arguments.jitter, num_steps=arguments.steps, seed=arguments.seed)


Goodputs = Sequence[tuple[str, "Recovery", float, "Goodput"]]
"""For each recovery of a scheme and each time between failures in hours: its name, the recovery, hours, goodput."""


def goodput_by_recovery(arguments: argparse.Namespace, result: StepResult) -> Goodputs:
    """Goodput of a scheme with each of its recoveries.

    Raises:
        ValueError: If a time is impossible.
    """
    from coarse.simulator.faults.goodput import RESTART_S, goodput, recoveries

    restart_s = RESTART_S.value if arguments.restart_s is None else arguments.restart_s
    return [
        (name, recovery, hours, goodput(result, recovery, hours, seed=arguments.seed))
        for hours in arguments.failures
        for name, recovery in recoveries(result, restart_s=restart_s).items()
    ]


def as_json(times: StepTimes | None, found: Goodputs) -> dict[str, Any]:
    """The fields of a scheme's record."""
    fields: dict[str, Any] = {} if times is None else {"jitter": times.as_json()}
    if found:
        fields["goodput"] = [
            {"recovery": name, "hours_between_failures": hours, **_finite(asdict(each))}
            for name, _, hours, each in found
        ]
    return fields


def _finite(fields: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no infinity."""
    return {name: value if value < float("inf") else None for name, value in fields.items()}


def print_jitter(pattern: Jitter, all_times: Sequence[StepTimes], undisturbed: Sequence[StepResult]) -> None:
    """Prints times of steps with jitter and of those without."""
    print_table(
        f"{pattern.num_steps} steps with jitter of {pattern.variation:.0%} (seed {pattern.seed}), simulated",
        ("scheme", "without, ms", "mean, ms", "median, ms", "99% within, ms", "mean / without"),
        [
            (
                times.scheme,
                f"{result.step_s * 1e3:.1f}",
                f"{times.mean_s * 1e3:.1f}",
                f"{times.percentile_s(50) * 1e3:.1f}",
                f"{times.percentile_s(99) * 1e3:.1f}",
                f"{times.mean_s / result.step_s:.3f}",
            )
            for times, result in zip(all_times, undisturbed, strict=True)
        ],
    )


def print_goodputs(found: Mapping[str, Goodputs]) -> None:
    """Prints goodput by scheme."""
    print_table(
        "Goodput with failures, simulated",
        (
            "h between failures",
            "scheme",
            "recovery",
            "failures a day",
            "checkpoint every",
            "goodput",
            "steps/h",
        ),
        sorted(
            (row for scheme in found for row in _rows(scheme, found[scheme])), key=lambda row: -float(row[0])
        ),
    )
    kinds = {name: recovery.what for each in found.values() for name, recovery, _, _ in each}
    print_table("Recoveries", ("recovery", "what happens"), list(kinds.items()))


def _rows(scheme: str, found: Goodputs) -> Iterator[tuple[str, ...]]:
    for name, _, hours, each in found:
        every_s = each.checkpoint_every_s
        yield (
            f"{hours:g}",
            scheme,
            name,
            f"{each.failures_per_day:.3g}",
            f"{every_s:.0f} s" if every_s < float("inf") else "never",
            f"{each.share:.1%}",
            f"{each.steps_per_hour:.0f}",
        )


def _worker_and_factor(text: str) -> tuple[int, float]:
    worker, factor = _link_and_factor(text)
    if not worker.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not WORKER=FACTOR, such as 3=1.5")
    return int(worker), factor


def _link_and_factor(text: str) -> tuple[str, float]:
    name, _, factor = text.rpartition("=")
    try:
        return name, float(factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FACTOR, such as 'worker 3 up=4'") from None


def _hours(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOURS[,HOURS], such as 10000,1000") from None

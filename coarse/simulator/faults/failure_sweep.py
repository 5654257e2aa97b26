"""Goodput over failure rates: a picture and a table of docs/simulator/failures.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from coarse.bench.replay.trace import load_trace, place_trace
from coarse.profiler.figures import COLOURS
from coarse.simulator.faults.goodput import goodput, recoveries
from coarse.simulator.scale import MODEL, SCHEMES, TFLOPS
from coarse.simulator.setup import Setup
from coarse.simulator.training_step import simulate_step

MACHINE, NUM_WORKERS = "cxl-pool", 1024
SHOWN = ("coarse", "allreduce")
HOURS = (30_000, 3_000, 1_000, 300, 100, 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSweep:
    """Goodput over mean times between failures; simulated.

    Args:
        hours: The times, of one worker or memory device.
        shares: Goodput at each time, by scheme and recovery.
    """

    hours: Sequence[float]
    shares: Mapping[tuple[str, str], Sequence[float]]


def sweep_failures(progress: Callable[[str], None], num_workers: int = NUM_WORKERS) -> FailureSweep:
    """Simulates a step of each scheme, and failures with each of its recoveries.

    Args:
        progress: Called with a few words before each scheme.
        num_workers: Workers of the job, a multiple of 8.
    """
    trace = place_trace(load_trace(MODEL), tflops=TFLOPS)
    setup = Setup(machine=MACHINE, trace=trace, num_workers=num_workers)
    shares: dict[tuple[str, str], Sequence[float]] = {}
    for scheme in SHOWN:
        progress(f"{scheme} on {MACHINE}, {num_workers} workers")
        result = simulate_step(setup, scheme)
        for name, recovery in recoveries(result).items():
            shares[scheme, name] = [goodput(result, recovery, hours).share for hours in HOURS]
    return FailureSweep(hours=HOURS, shares=shares)


def draw_failures(found: FailureSweep) -> Figure:
    """A line for each scheme and recovery."""
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for (key, shares), colour, marker in zip(found.shares.items(), COLOURS, "os^D", strict=False):
        axes.plot(found.hours, shares, color=colour, marker=marker, label=_label(*key))
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.xaxis.set_major_locator(FixedLocator(list(found.hours)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{hours:,}" for hours in found.hours])
    axes.set_xlabel("hours between failures of one worker or memory device")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylabel("goodput")
    axes.legend(fontsize="small", loc="lower left")
    figure.suptitle(
        f"{MODEL} at {TFLOPS:g} TFLOPS, {MACHINE}, {NUM_WORKERS:,} workers (simulated)", fontsize=11
    )
    return figure


def failure_lines(found: FailureSweep) -> Iterator[str]:
    """The table in Markdown."""
    yield "| goodput, *simulated* |" + "".join(f" {hours:,} h |" for hours in found.hours)
    yield "|---|" + "---|" * len(found.hours)
    for key, shares in found.shares.items():
        yield f"| {_label(*key)} |" + "".join(f" {share:.1%} |" for share in shares)


def _label(scheme: str, recovery: str) -> str:
    return f"{SCHEMES[scheme]}: {recovery}"

"""How a step's time grows with the number of workers: a picture and a table of docs/simulator.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from coarse.bench.replay.trace import load_trace, place_trace
from coarse.profiler.figures import COLOURS
from coarse.simulator.setup import Setup
from coarse.simulator.training_step import simulate_step

MACHINES = ("cxl-pool", "fat-tree")
SCHEMES: Mapping[str, str] = {
    "coarse": "COARSE",
    "allreduce": "AllReduce",
    "parameter-server": "parameter server",
    "fsdp": "FSDP",
}
WORKERS = (8, 32, 128, 512, 2048, 10_000)
MODEL, TFLOPS = "bert-large", 60.0  # assumed: what a GPU of the time of CXL 3 sustains of its peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Steps over numbers of workers; simulated.

    Args:
        workers: The numbers.
        steps_s: Seconds of a step of each number, by machine and scheme.
        compute_s: Seconds of its computation.
    """

    workers: Sequence[int]
    steps_s: Mapping[tuple[str, str], Sequence[float]]
    compute_s: float


def sweep(progress: Callable[[str], None], workers: Sequence[int] = WORKERS) -> Sweep:
    """Simulates all machines, schemes and numbers of workers; takes a minute of one core.

    Args:
        progress: Called with a few words before each step.
        workers: Numbers of workers, multiples of 8.
    """
    trace = place_trace(load_trace(MODEL), tflops=TFLOPS)
    steps_s: dict[tuple[str, str], list[float]] = {}
    for machine in MACHINES:
        for scheme in SCHEMES:
            for number in workers:
                progress(f"{scheme} on {machine}, {number} workers")
                setup = Setup(machine=machine, trace=trace, num_workers=number)
                steps_s.setdefault((machine, scheme), []).append(simulate_step(setup, scheme).step_s)
    return Sweep(workers=tuple(workers), steps_s=steps_s, compute_s=trace.forward_s + trace.backward_s)


def draw_sweep(found: Sweep) -> Figure:
    """A panel for each machine, a line for each scheme, and the computation dotted."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, len(MACHINES), sharey=True)
    for axes, machine in zip(panels, MACHINES, strict=True):
        for scheme, colour, marker in zip(SCHEMES, COLOURS, "os^D", strict=False):
            times_ms = [1e3 * seconds for seconds in found.steps_s[machine, scheme]]
            axes.plot(found.workers, times_ms, color=colour, marker=marker, label=SCHEMES[scheme])
        axes.axhline(1e3 * found.compute_s, color="0.4", linestyle=":", label="computation")
        axes.set_title(f"{machine} (simulated)", fontsize=10)
        _label(axes, found.workers)
    panels[0].set_ylabel("a step, ms")
    panels[0].set_yscale("log")
    panels[0].yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panels[0].legend(fontsize="small")
    figure.suptitle(f"{MODEL} at {TFLOPS:g} TFLOPS, a memory device for each worker", fontsize=11)
    return figure


def sweep_lines(found: Sweep) -> Iterator[str]:
    """The table in Markdown."""
    yield "| a step, ms, *simulated* |" + "".join(f" {number:,} workers |" for number in found.workers)
    yield "|---|" + "---|" * len(found.workers)
    for (machine, scheme), steps_s in found.steps_s.items():
        cells = "".join(f" {1e3 * seconds:.1f} |" for seconds in steps_s)
        yield f"| {SCHEMES[scheme]} on {machine} |{cells}"


def _label(axes: Axes, workers: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(workers)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{number:,}" for number in workers])
    axes.set_xlabel("workers")

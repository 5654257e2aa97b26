"""Plots of the study. Needs matplotlib (`coarse[plot]`). Lines and bars are simulated, crosses the document's."""

from __future__ import annotations

from matplotlib.figure import Figure

from coarse.profiler.figures import COLOURS
from coarse.simulator.studies.gpu_networking.control_paths import GDS, SIX
from coarse.simulator.studies.gpu_networking.messages import grown, kernel_us_per_byte, one_sided_put
from coarse.simulator.studies.gpu_networking.stages import SLIDE_16, SLIDE_59, ActiveMessage
from coarse.simulator.studies.gpu_networking.traces import best_us

_SIZES = tuple(1 << power for power in range(14, 28, 2))
_NODES = 8


def stages_figure() -> Figure:
    """Slide 16's stages of 64 B, and those of 4 KB that follow from them."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    messages = {
        f"{scheme}\n{nbytes} B": grown(
            SLIDE_16[64][scheme], nbytes=nbytes, kernel_us_per_byte=kernel_us_per_byte()
        )
        for nbytes in SLIDE_16
        for scheme in ("XTQ", "HSA")
    }
    bottoms = [0.0] * len(messages)
    for stage, colour in zip(ActiveMessage._fields, COLOURS, strict=False):
        heights = [getattr(stages, stage) for stages in messages.values()]
        axes.bar(list(messages), heights, bottom=bottoms, color=colour, label=stage)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    sums = [sum(of[scheme]) for of in SLIDE_16.values() for scheme in ("XTQ", "HSA")]
    axes.plot(list(messages), sums, "kx", markersize=9, label="sum on the slide")
    axes.set_ylabel("time, us")
    axes.set_title("An active message, simulated from the stages of 64 B (slide 16)")
    axes.legend(fontsize="small", ncols=2)
    return figure


def puts_figure() -> Figure:
    """When slide 59's target has the data."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    times = {scheme: one_sided_put(scheme) for scheme in SLIDE_59}
    places = range(len(times))
    axes.bar(
        [place - 0.2 for place in places],
        [each.initiator_us for each in times.values()],
        0.4,
        color=COLOURS[0],
        label="initiator is done",
    )
    axes.bar(
        [place + 0.2 for place in places],
        [each.target_us for each in times.values()],
        0.4,
        color=COLOURS[1],
        hatch="///",
        label="target has the data",
    )
    axes.plot(
        [place + 0.2 for place in places],
        [each.target_wait for each in SLIDE_59.values()],
        "kx",
        label="target's wait on the slide",
    )
    axes.set_xticks(list(places), list(times))
    axes.set_ylabel("time, us")
    axes.set_title("A one-sided put, simulated (slide 59)")
    axes.legend(fontsize="small")
    return figure


def all_reduce_figure() -> Figure:
    """A ring all-reduce by size, relative to GPUDirect Async."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for path, colour, marker in zip(SIX, COLOURS, "osv^Dx", strict=False):
        ratios = [best_us(GDS, nbytes, _NODES) / best_us(path, nbytes, _NODES) for nbytes in _SIZES]
        axes.plot(_SIZES, ratios, color=colour, marker=marker, label=path.who.name)
    axes.axhline(1.2, color="black", linestyle=":", label="GPU-TN, slide 49: about 1.2")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of each node")
    axes.set_ylabel("speed-up over GDS")
    axes.set_title(f"Ring all-reduce of {_NODES} nodes, simulated")
    axes.legend(fontsize="small")
    return figure

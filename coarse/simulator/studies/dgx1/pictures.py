"""Plots of the study. Needs matplotlib (`coarse[plot]`). Lines and bars are simulated, crosses the document's."""

from __future__ import annotations

from matplotlib.figure import Figure

from coarse.profiler.figures import COLOURS
from coarse.simulator.studies.dgx1.figures import EIGHT_GPUS, GPU_COUNTS, PASCAL
from coarse.simulator.studies.dgx1.parameters import eight_gpus_s, machine
from coarse.simulator.studies.study import Basis, Comparison


def scaling_figure() -> Figure:
    """Table 2.6: time of an epoch by GPUs."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for place, (name, batches) in enumerate(EIGHT_GPUS.items()):
        axes = figure.add_subplot(1, len(EIGHT_GPUS), place + 1)
        for colour, (batch, document) in zip(COLOURS, batches.items(), strict=False):
            seconds = [eight_gpus_s(name, batch, num_gpus, machine(PASCAL)) for num_gpus in GPU_COUNTS]
            axes.plot(GPU_COUNTS, seconds, color=colour, label=f"batch {batch}, simulated")
            axes.plot(GPU_COUNTS, document, "x", color=colour, label=f"batch {batch}, Table 2.6")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(GPU_COUNTS, [str(each) for each in GPU_COUNTS])
        axes.set_xlabel("GPUs")
        axes.set_title(name)
        if not place:
            axes.set_ylabel("time of an epoch, s")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle("The tree on DGX-1 with P100, simulated")
    return figure


def copies_figure(comparisons: list[Comparison]) -> Figure:
    """Table 2.4: time of all copies between two GPUs, compared with the document's."""
    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    copies = [each for each in comparisons if "copies between GPUs" in each.what]
    for basis, colour, marker in ((Basis.FITTED, COLOURS[1], "o"), (Basis.PREDICTED, COLOURS[0], "x")):
        points = [each for each in copies if each.basis is basis]
        axes.plot(
            [each.document for each in points],
            [each.simulated for each in points],
            marker,
            color=colour,
            label=basis.value,
        )
    ends = [min(each.document for each in copies), max(each.document for each in copies)]
    axes.plot(ends, ends, color="black", linewidth=0.8, label="equal")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("Table 2.4, ms")
    axes.set_ylabel("simulated, ms")
    axes.set_title("Copies between two GPUs in an epoch")
    axes.legend()
    return figure

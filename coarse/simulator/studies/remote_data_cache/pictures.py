"""Plots of the study, with the document's figures where its text gives them. Needs matplotlib (`coarse[plot]`)."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coarse.profiler.figures import COLOURS
from coarse.simulator.studies.remote_data_cache.results import LINK_SYSTEMS, LINKS_GBYTES_PER_S, Results
from coarse.simulator.studies.remote_data_cache.systems import (
    HARDWARE,
    IDEAL,
    NUMA,
    REPLICATION,
    SIZES_GIB,
    SOFTWARE,
    sized,
)

_BARS = (NUMA, REPLICATION, SOFTWARE, HARDWARE, IDEAL)
_HATCHES = ("", "///", "...", "", "xx")
_DOCUMENT_SPEEDUPS = {0.0: 2.53, 0.5: 3.50, 1.0: 3.55, 2.0: 3.61, 4.0: 3.65}
_DOCUMENT_SPEEDS = {0.5: 0.96, 1.0: 0.94, 2.0: 0.83, 4.0: 0.76}
_DOCUMENT_LINKS = {NUMA: 2.5, REPLICATION: 2.75, HARDWARE: 3.6, IDEAL: 3.7}  # at 64 GB/s
_MARKER = {"linestyle": "none", "marker": "x", "color": "black", "markersize": 8}


def workloads(results: Results) -> Figure:
    """Speed-ups and remote accesses of every workload (Figures 8, 11 and 13)."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    speeds, shares = figure.subplots(2, 1, sharex=True)
    names = list(results.by_name)
    for place, (system, hatch) in enumerate(zip(_BARS, _HATCHES, strict=True)):
        values = [each.speedups[system] for each in results.by_name.values()]
        _bars(speeds, place, len(_BARS), values, label=system, hatch=hatch)
    for place, system in enumerate((NUMA, SOFTWARE, HARDWARE)):
        values = [each.remote_shares[system] for each in results.by_name.values()]
        where = _BARS.index(system)
        _bars(shares, place, 3, values, label=system, hatch=_HATCHES[where], colour=COLOURS[where])
    speeds.set_ylabel("speed-up over one GPU")
    shares.set_ylabel("remote part of memory accesses")
    shares.set_xticks(range(len(names)), names, rotation=45, ha="right")
    speeds.legend(fontsize="small", ncols=len(_BARS), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.suptitle("Four GPUs with and without remote data caches (simulated)")
    return figure


def sensitivity(results: Results) -> Figure:
    """Size of the cache (Table V) and links between GPUs (Fig 14)."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    sizes, memory, links = figure.subplots(1, 3)
    _plot(sizes, SIZES_GIB, [results.speedup(sized(gib)) for gib in SIZES_GIB], 3, "CARVE-HWC")
    sizes.plot(0, results.speedup(NUMA), marker="o", linestyle="none", color=COLOURS[0], label=NUMA)
    sizes.plot(list(_DOCUMENT_SPEEDUPS), list(_DOCUMENT_SPEEDUPS.values()), label="document", **_MARKER)
    sizes.set_xlabel("cache per GPU, GiB")
    sizes.set_ylabel("speed-up over one GPU")
    _plot(memory, SIZES_GIB, [results.slowdown(gib) for gib in SIZES_GIB], 3, "CARVE-HWC")
    memory.plot(list(_DOCUMENT_SPEEDS), list(_DOCUMENT_SPEEDS.values()), label="document", **_MARKER)
    memory.set_xlabel("GiB of pages per GPU in the host's memory")
    memory.set_ylabel("relative speed")
    for system in LINK_SYSTEMS:
        values = [results.link_speedup(system, rate) for rate in LINKS_GBYTES_PER_S]
        _plot(links, LINKS_GBYTES_PER_S, values, _BARS.index(system), system)
    links.plot([64] * len(_DOCUMENT_LINKS), list(_DOCUMENT_LINKS.values()), label="document", **_MARKER)
    links.set_xscale("log", base=2)
    links.set_xticks(LINKS_GBYTES_PER_S, [f"{rate:g}" for rate in LINKS_GBYTES_PER_S])
    links.set_xlabel("link between GPUs, GB/s each direction")
    links.set_ylabel("speed-up over one GPU")
    for axes in (sizes, memory, links):
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    figure.suptitle("Size of the cache, memory that it takes, and links (simulated, geometric means)")
    return figure


def _bars(
    axes: Axes, place: int, num: int, values: list[float], *, label: str, hatch: str, colour: str = ""
) -> None:
    width = 0.84 / num
    centres = np.arange(len(values)) + (place - (num - 1) / 2) * width
    axes.bar(
        centres, values, width, label=label, hatch=hatch, color=colour or COLOURS[place], edgecolor="white"
    )


def _plot(axes: Axes, x: object, y: object, place: int, label: str) -> None:
    axes.plot(x, y, marker="osv^D"[place], color=COLOURS[place], label=label)  # type: ignore[arg-type]

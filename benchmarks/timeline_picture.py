"""Draws a part of a timeline: a row for each thread, a colour for each kind of work. Needs matplotlib.

    coarse run -n 2 --timeline trace.json.gz script.py
    python benchmarks/timeline_picture.py trace.json.gz picture --step 10 --steps 3

The picture is for documents; Perfetto shows everything, with names and arrows.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from coarse.profiler.figures import COLOURS, save_figure

ROWS = {
    "": ("forward", "backward", "step"),
    "push, pull": ("push", "pull", "reduce own", "copy pieces"),
    "waits": ("wait for",),
}
"""Kinds of a worker's slices in each of its rows; a sync core has one row."""

COLOUR_OF = {
    "forward": COLOURS[0],
    "backward": COLOURS[1],
    "step": COLOURS[2],
    "push": COLOURS[3],
    "pull": COLOURS[4],
    "wait for": "0.75",
    "reduce": COLOURS[6],
    "update": COLOURS[5],
    "keep old version": COLOURS[7],
}

Slice = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path, help="its path without .svg and .png")
    parser.add_argument("--step", type=int, default=10, help="the first step to draw (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="number of steps (%(default)s)")
    parser.add_argument("--title", default="measured")
    arguments = parser.parse_args()
    contents = arguments.trace.read_bytes()
    events = json.loads(gzip.decompress(contents) if arguments.trace.suffix == ".gz" else contents)[
        "traceEvents"
    ]
    begin_us, end_us = interval(events, arguments.step, arguments.steps)
    save_figure(draw(events, begin_us, end_us, arguments.title), arguments.picture)


def interval(events: list[Slice], step: int, steps: int) -> tuple[float, float]:
    """The time from a forward of worker 0 to the one `steps` later."""
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "worker 0")
    begins = [e["ts"] for e in events if e["name"] == "forward" and e["pid"] == pid]
    return begins[step], begins[step + steps]


def draw(events: list[Slice], begin_us: float, end_us: float, title: str) -> Figure:
    """A figure of the slices between two times."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots()
    shown = [e for e in events if e["ph"] == "X" and e["ts"] < end_us and e["ts"] + e["dur"] > begin_us]
    labels = []
    for row, (label, slices) in enumerate(rows(events, shown)):
        labels.append(label)
        for each in slices:
            bar(axes, row, each, begin_us, end_us)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, (end_us - begin_us) / 1e3)
    axes.set_xlabel("time (ms)")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    used = {kind_of(each["name"]) for each in shown}
    patches = [Patch(color=COLOUR_OF[kind], label=kind) for kind in COLOUR_OF if kind in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    return figure


def rows(events: list[Slice], shown: list[Slice]) -> Iterator[tuple[str, list[Slice]]]:
    """The label of each row and its slices; rows without slices are left out."""
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for pid, name in names.items():
        if name.startswith("worker"):
            for label, kinds in ROWS.items():
                if slices := [e for e in shown if e["pid"] == pid and e["name"].startswith(kinds)]:
                    yield label or name, slices
            continue
        for (of, tid), thread in sorted(threads.items()):
            if of == pid and (slices := [e for e in shown if (e["pid"], e["tid"]) == (pid, tid)]):
                yield f"{name.removeprefix('memory device ')} {thread}", slices


def kind_of(name: str) -> str:
    """The kind of work that a slice's name begins with; "" for others."""
    return next((kind for kind in COLOUR_OF if name.startswith(kind)), "")


def bar(axes: Axes, row: int, each: Slice, begin_us: float, end_us: float) -> None:
    kind = kind_of(each["name"])
    if not kind:
        return
    begin, end = max(each["ts"], begin_us), min(each["ts"] + each["dur"], end_us)
    axes.barh(
        row,
        (end - begin) / 1e3,
        left=(begin - begin_us) / 1e3,
        height=0.8,
        color=COLOUR_OF[kind],
        linewidth=0,
    )


if __name__ == "__main__":
    main()

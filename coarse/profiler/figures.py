"""Plots of profiles and of transfers: the paper's Figures 8, 9, 14 and 15. Needs matplotlib (`coarse-train[plot]`).

Pure functions that return a matplotlib Figure; save_figure() writes it. Every title names the machine and the kind of
the data. Colours are those of Okabe and Ito, which colour-blind readers can distinguish. Lines also differ in their
markers and bars in their hatches, so that black-and-white prints are readable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from coarse.profiler.alpha_beta import AlphaBeta
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.profile import BOTH, PROFILE_KINDS, PULL, PUSH, Profile
from coarse.profiler.routing import RoutingTable

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
"""Okabe and Ito's palette, the darker ones first."""

HATCHES = ("", "///", "...", "xx")
"""Hatches of bars, used in turn when all colours are used."""

LOCAL_STYLE: Mapping[str, Any] = {"color": COLOURS[0], "marker": "o", "linestyle": "-"}
REMOTE_STYLE: Mapping[str, Any] = {"color": COLOURS[1], "marker": "s", "linestyle": "--"}
_OTHER_STYLE: Mapping[str, Any] = {"color": "0.75", "linestyle": "-", "linewidth": 0.8, "zorder": 1}
_DIRECTIONS = {PUSH: "push", PULL: "pull", BOTH: "push and pull at once"}
_PNG_DOTS_PER_INCH = 160
# Without a date and random names, equal figures give equal files.
_SAVE_SETTINGS: dict[Any, Any] = {"svg.hashsalt": "coarse", "svg.fonttype": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A shard on a link, in one direction.

    Args:
        link: Link and direction, e.g. "w0 > md1"; the row of a timeline.
        tensor: Number of the shard's tensor.
        nbytes: Size of the shard.
        start_us, end_us: When it entered the link, and when all of it had arrived.

    Raises:
        ValueError: If it ends before it starts, or has no bytes.
    """

    link: str
    tensor: int
    nbytes: int
    start_us: float
    end_us: float

    def __post_init__(self) -> None:
        if self.nbytes < 1 or not self.start_us <= self.end_us < math.inf:
            raise ValueError(f"a transfer carries bytes and ends after it starts: {self}")


def describe(profile: Profile) -> str:
    """Machine, size and kind of a profile in words, for titles."""
    key = profile.key
    return f"{key.machine}, {key.num_workers} workers, {key.num_devices} memory devices ({profile.kind})"


def format_size(nbytes: float) -> str:
    """A size with three digits and a binary unit: 4 KiB, 1.5 MiB."""
    for unit, length in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= length:
            return f"{nbytes / length:.3g} {unit}"
    return f"{nbytes:.3g} B"


def widest_remote(profile: Profile, worker: int) -> int | None:
    """The remote memory device with the highest bandwidth in both directions at once (paper, Fig 15).

    Ties go to the lowest latency, then to the lowest number; None if no remote device exists.
    """
    curves = profile.both_at_once(worker)
    del curves[profile.key.local_devices[worker]]
    return min(curves, key=lambda device: _width_first(curves[device], device), default=None)


def busy_fraction(transfers: Sequence[Transfer]) -> dict[str, float]:
    """The fraction of the time, from the first start to the last end, in which each link is busy."""
    if not transfers:
        return {}
    begin, end = min(t.start_us for t in transfers), max(t.end_us for t in transfers)
    links = dict.fromkeys(transfer.link for transfer in transfers)
    spans = {link: [(t.start_us, t.end_us) for t in transfers if t.link == link] for link in links}
    return {link: _covered_us(spans[link]) / (end - begin) if end > begin else 0.0 for link in links}


# ---- Figure 8 ----


def draw_bandwidth_matrix(profile: Profile) -> Figure:
    """The highest bandwidth between every worker and memory device, as the sum of both directions (paper, Fig 8).

    Marks local pairs, which share a switch.
    """
    key = profile.key
    sums = [
        [2 * profile.curve(BOTH, worker, device).peak_gbytes_per_s for device in range(key.num_devices)]
        for worker in range(key.num_workers)
    ]
    figure = Figure(figsize=(2.4 + 0.9 * key.num_devices, 1.8 + 0.7 * key.num_workers), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(sums, cmap="cividis", vmin=0, aspect="auto")
    for worker, row in enumerate(sums):
        for device, gbytes_per_s in enumerate(row):
            # The upper half of the colour map is light.
            ink = "black" if gbytes_per_s > max(map(max, sums)) / 2 else "white"
            text = f"{gbytes_per_s:.3g}" + ("\nlocal" if device == key.local_devices[worker] else "")
            axes.text(device, worker, text, ha="center", va="center", color=ink)
    axes.set_xticks(range(key.num_devices), [f"md{device}" for device in range(key.num_devices)])
    axes.set_yticks(range(key.num_workers), [f"w{worker}" for worker in range(key.num_workers)])
    axes.set_xlabel("memory device")
    axes.set_ylabel("worker")
    figure.colorbar(image, ax=axes, label="GB/s, both directions")
    return _titled(figure, "Bidirectional bandwidth", describe(profile))


# ---- Figures 14 and 15 ----


def draw_by_size(
    profile: Profile,
    *,
    worker: int = 0,
    table: RoutingTable | None = None,
    shard_bytes: int | None = None,
    kinds: Sequence[str] = (PUSH, PULL, BOTH),
) -> Figure:
    """Bandwidth and time by size, a column for each direction (paper, Fig 14).

    Marks the local memory device and the widest remote one; others are grey.

    Args:
        profile: Profile of the machine.
        worker: The worker whose paths are drawn.
        table: Its routing table, whose threshold S is drawn as a line.
        shard_bytes: S', drawn as a line.
        kinds: Any of PUSH, PULL and BOTH; for BOTH, the bandwidth is that of each direction.
    """
    figure = Figure(figsize=(3.6 * len(kinds) + 0.4, 6), layout="constrained")
    panels = figure.subplots(2, len(kinds), sharex=True, sharey="row", squeeze=False)
    for column, kind in zip(panels.T, kinds, strict=True):
        for axes, value in zip(column, (_bandwidth, _time), strict=True):
            _draw_curves(axes, profile, worker, kind, value)
            _draw_sizes(axes, profile, worker, table, shard_bytes)
        column[0].set_title(_DIRECTIONS[kind])
        column[1].set_yscale("log")
    panels[0, 0].set_ylabel("bandwidth, GB/s each way")
    panels[0, 0].set_ylim(bottom=0)
    panels[1, 0].set_ylabel("time, us")
    panels[0, -1].legend(fontsize="small")
    return _titled(figure, f"Bandwidth and time by size, worker {worker}", describe(profile))


def draw_normalised(
    profiles: Sequence[Profile], tables: Sequence[RoutingTable], *, worker: int = 0
) -> Figure:
    """Time and bandwidth of the widest remote memory device, relative to the local one (paper, Fig 15).

    Args:
        profiles: Profiles with a remote memory device, one for each column.
        tables: The worker's routing table for each profile.
        worker: The worker whose paths are drawn.

    Raises:
        ValueError: If a profile has no remote memory device.
    """
    figure = Figure(figsize=(3.6 * len(profiles) + 0.4, 5.6), layout="constrained")
    panels = figure.subplots(2, len(profiles), sharex=True, sharey="row", squeeze=False)
    for column, profile, table in zip(panels.T, profiles, tables, strict=True):
        for axes, value in zip(column, (_time, _bandwidth), strict=True):
            _draw_relative(axes, profile, worker, value)
            _draw_sizes(axes, profile, worker, table, None)
        column[0].set_title(f"{profile.key.machine} ({profile.kind})")
        column[1].legend(fontsize="small", loc="lower right")
    for axes, what in zip(panels[:, 0], ("time", "bandwidth"), strict=True):
        axes.set_ylabel(f"{what}, local = 1")
        axes.set_ylim(bottom=0)  # for all columns, after all are drawn
    figure.suptitle(f"Remote and local memory device, worker {worker}", fontsize=11)
    return figure


# ---- Figure 9 ----


def draw_timeline(timelines: Mapping[str, Sequence[Transfer]], *, machine: str, kind: str) -> Figure:
    """Transfers over time: a panel for each timeline, a row for each link and direction, a bar for each shard.

    Args:
        timelines: Transfers by the title of their panel; all panels share one time axis.
        machine: Machine of the transfers.
        kind: Measured, emulated or simulated.

    Raises:
        ValueError: If the timelines are empty, or the kind is unknown.
    """
    if not timelines or not all(timelines.values()):
        raise ValueError("a timeline needs at least one transfer")
    if kind not in PROFILE_KINDS:
        raise ValueError(f"kind {kind!r} must be one of {', '.join(PROFILE_KINDS)}")
    rows = [list(dict.fromkeys(t.link for t in transfers)) for transfers in timelines.values()]
    figure = Figure(figsize=(9, 1.2 + sum(0.5 + 0.42 * len(links) for links in rows)), layout="constrained")
    panels = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, height_ratios=[1 + len(links) for links in rows]
    )[:, 0]
    end_us = max(transfer.end_us for transfers in timelines.values() for transfer in transfers)
    for axes, (title, transfers), links in zip(panels, timelines.items(), rows, strict=True):
        _draw_transfers(axes, transfers, links, least_labelled_us=end_us / 80)
        axes.set_title(f"{title}: {max(t.end_us for t in transfers) / 1e3:.3g} ms", loc="left", fontsize=10)
    panels[-1].set_xlabel("ms; numbers and colours are tensors")
    panels[-1].set_xlim(left=0)
    return _titled(figure, "Transfers", f"{machine} ({kind})")


# ---- switch-over sizes ----


def draw_crossings(
    measured: Mapping[str, Curve], predicted: Mapping[str, AlphaBeta], *, whereof: str
) -> Figure:
    """Time by size of alternative ways: measured points on the lines that a model predicts.

    Args:
        measured: Curves by the name of the way; all at the same sizes.
        predicted: The model of each way.
        whereof: Machine and kind, for the title.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for (name, curve), colour, mark in zip(measured.items(), COLOURS, "osv^D", strict=False):
        sizes = [point.nbytes for point in curve.points]
        axes.plot(sizes, [predicted[name].time_us(nbytes) for nbytes in sizes], color=colour, linewidth=1)
        times_us = [point.time_us for point in curve.points]
        axes.plot(sizes, times_us, mark, color=colour, markersize=5, label=name)
    axes.set_yscale("log")
    axes.set_ylabel("time, us (lines: predicted)")
    _draw_size_axis(axes, [point.nbytes for curve in measured.values() for point in curve.points])
    axes.legend(fontsize="small")
    return _titled(figure, "All-reduce among the workers by size", whereof)


def save_figure(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Writes a figure as PNG and SVG, and returns the files; the same figure gives the same files.

    Args:
        figure: The figure to write.
        stem: Path of the files without their suffix; creates its folder if missing.

    Raises:
        OSError: If they cannot be written.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    with matplotlib.rc_context(_SAVE_SETTINGS):
        figure.savefig(png, dpi=_PNG_DOTS_PER_INCH, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None})
    return png, svg


# ---- parts ----

_Value = Callable[[CurvePoint], float]


def _bandwidth(point: CurvePoint) -> float:
    return point.gbytes_per_s


def _time(point: CurvePoint) -> float:
    return point.time_us


def _width_first(curve: Curve, device: int) -> tuple[float, float, int]:
    # In steps of a per mille, so that rounding does not separate equal values.
    return -round(math.log(curve.peak_gbytes_per_s), 3), round(math.log(curve.latency_us), 3), device


def _covered_us(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    covered, until = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _draw_curves(axes: Axes, profile: Profile, worker: int, kind: str, value: _Value) -> None:
    local, remote = profile.key.local_devices[worker], widest_remote(profile, worker)
    for device in range(profile.key.num_devices):
        points = profile.curve(kind, worker, device).points
        sizes, values = [point.nbytes for point in points], [value(point) for point in points]
        if device in (local, remote):
            style = LOCAL_STYLE if device == local else REMOTE_STYLE
            place = "local" if device == local else "remote"
            axes.plot(sizes, values, label=f"md{device} ({place})", markersize=4, **style)
        else:
            axes.plot(sizes, values, **_OTHER_STYLE)


def _draw_relative(axes: Axes, profile: Profile, worker: int, value: _Value) -> None:
    local, remote = profile.key.local_devices[worker], widest_remote(profile, worker)
    if remote is None:
        raise ValueError(f"{describe(profile)}: worker {worker} has no remote memory device to compare with")
    curves = [profile.curve(BOTH, worker, device) for device in (local, remote)]
    pairs = list(zip(*(curve.points for curve in curves), strict=True))
    sizes = [point.nbytes for point, _ in pairs]
    ratios = [value(far) / value(near) for near, far in pairs]
    axes.plot(sizes, [1.0] * len(sizes), label=f"local, md{local}", markersize=4, **LOCAL_STYLE)
    axes.plot(sizes, ratios, label=f"remote, md{remote}", markersize=4, **REMOTE_STYLE)


def _draw_sizes(
    axes: Axes, profile: Profile, worker: int, table: RoutingTable | None, shard_bytes: int | None
) -> None:
    """Draws the axis of sizes, and lines where the plan changes."""
    _draw_size_axis(axes, [point.nbytes for point in profile.both_at_once(worker)[0].points])
    if table is not None and table.threshold_bytes:
        _draw_size(axes, table.threshold_bytes, f"S = {format_size(table.threshold_bytes)}", "-.")
    if shard_bytes is not None:
        _draw_size(axes, shard_bytes, f"S' = {format_size(shard_bytes)}", ":")


def _draw_size_axis(axes: Axes, nbytes: Sequence[int]) -> None:
    sizes = sorted(set(nbytes))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes[:: max(1, len(sizes) // 5)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: format_size(nbytes)))
    axes.tick_params(axis="x", labelsize="small", rotation=30)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)


def _draw_size(axes: Axes, nbytes: int, label: str, linestyle: str) -> None:
    axes.axvline(nbytes, color="black", linestyle=linestyle, linewidth=1.2, label=label)


def _draw_transfers(
    axes: Axes, transfers: Sequence[Transfer], links: Sequence[str], *, least_labelled_us: float
) -> None:
    for transfer in transfers:
        row, width_us = links.index(transfer.link), transfer.end_us - transfer.start_us
        colour = COLOURS[transfer.tensor % len(COLOURS)]
        axes.barh(
            row,
            width_us / 1e3,
            left=transfer.start_us / 1e3,
            height=0.78,
            color=colour,
            hatch=HATCHES[transfer.tensor // len(COLOURS) % len(HATCHES)],
            edgecolor="white",
            linewidth=0.5,
        )
        if width_us >= least_labelled_us:
            ink = "black" if colour in COLOURS[3:7] else "white"
            middle_ms = (transfer.start_us + width_us / 2) / 1e3
            axes.text(middle_ms, row, str(transfer.tensor), ha="center", va="center", color=ink, fontsize=8)
    axes.set_yticks(range(len(links)), links)
    axes.set_ylim(len(links) - 0.5, -0.5)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)


def _titled(figure: Figure, what: str, whereof: str) -> Figure:
    figure.suptitle(f"{what}\n{whereof}", fontsize=11)
    return figure

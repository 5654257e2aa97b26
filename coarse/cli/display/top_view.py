"""Tables of `coarse top` for the terminal, from one sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from coarse.cli.display.tables import format_size
from coarse.dashboard.sampler import not_shown
from coarse.dashboard.samples import FAULT, SILENT, STARTS, WAITS, Device, Event, Link, Sample, Worker

Item = TypeVar("Item")

_STATE_STYLES = {SILENT: "red", STARTS: "dim", WAITS: "cyan"}
_LIMITING_STYLE = "yellow"
_FAULT_STYLE = "red"
_LIMITING_SHARE = 0.9  # use of a link or of sync cores from which they count as the bottleneck
_LEAST_TEXT = 8  # columns of the terminal for the last column of a table


def view(sample: Sample, events: Sequence[Event], *, most_rows: int) -> RenderableType:
    """The tables of a sample.

    Args:
        sample: State of the job.
        events: The newest events, oldest first.
        most_rows: Largest number of rows of each table; the rows that matter most stay.
    """
    tables = [_workers(sample, most_rows), _devices(sample, most_rows), _links(sample.links, most_rows)]
    parts: list[RenderableType] = [_heading(sample)]
    for table in tables:
        parts += [Text(), table] if table.rows else []
    return Group(*parts, Text(), *_lines(sample, events))


def describe_event(event: Event) -> str:
    """An event in a line."""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.time_s))} {event.kind}: {event.text}"


def format_rate(bytes_per_s: float) -> str:
    """Bytes per second in a decimal unit."""
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= factor:
            return f"{format_number(bytes_per_s / factor)} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def format_number(value: float) -> str:
    """A number that is not negative, in three digits or, from 100 on, as a whole number."""
    return f"{value:.3g}" if value < 99.95 else f"{value:.0f}"


def format_time(seconds: float) -> str:
    """A duration; "-" for 0, which stands for none."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{format_number(seconds / factor)} {unit}"
    return "-"


def _heading(sample: Sample) -> Text:
    parts = [sample.program, f"step {sample.step}", f"{format_number(sample.steps_per_s)} steps/s"]
    parts += [f"{format_number(sample.samples_per_s)} samples/s"] if sample.samples_per_s else []
    parts += [f"restarts {sample.restarts}"] if sample.restarts else []
    parts += [f"emulates {sample.machine}"] if sample.machine else []
    heading = _line(f"job {sample.job}: {', '.join(filter(None, parts))}", "bold")
    return heading.append(time.strftime("  %H:%M:%S", time.localtime(sample.time_s)), "not bold dim")


def _workers(sample: Sample, most_rows: int) -> _Rows:
    columns = ("worker", ">step", ">time", ">own", ">blocked", ">samples/s", ">memory", "doing")
    table = _Rows(*columns, dispensable=(">samples/s", ">memory", ">own", ">blocked"))

    def weight(worker: Worker) -> tuple[bool, ...]:
        return worker.rank == sample.slowest, worker.state == SILENT, worker.state == WAITS

    for worker in _chosen(table, sample.workers, weight, most_rows):
        is_slowest = worker.rank == sample.slowest
        style = _LIMITING_STYLE if is_slowest else _STATE_STYLES.get(worker.state, "")
        table.add(style, _cells_of_worker(worker, is_slowest=is_slowest))
    return table


def _cells_of_worker(worker: Worker, *, is_slowest: bool) -> Iterator[str]:
    yield str(worker.rank)
    yield str(worker.step)
    yield format_time(worker.step_s)
    yield format_time(worker.own_s)
    yield _share(worker.blocked_s, worker.step_s)
    yield format_number(worker.samples_per_s) if worker.samples_per_s else "-"
    yield format_size(worker.private_bytes) if worker.private_bytes else "-"
    yield f"{'slow: ' if is_slowest else ''}{worker.doing.removeprefix('is in ')}"


def _devices(sample: Sample, most_rows: int) -> _Rows:
    columns = ("device", "in", ">busy", ">cores", ">queue", ">pool", ">memory", "reserved for")
    table = _Rows(*columns, dispensable=(">pool", ">cores", "in", ">queue", "reserved for"))
    for device in _chosen(table, sample.devices, lambda each: (each.is_silent, each.busy), most_rows):
        style = _LIMITING_STYLE if device.busy >= _LIMITING_SHARE else ""
        table.add(_STATE_STYLES[SILENT] if device.is_silent else style, _cells_of_device(device, sample))
    return table


def _cells_of_device(device: Device, sample: Sample) -> Iterator[str]:
    name = f"{device.node} md{device.number}".lstrip()
    reserved = (f"{each.what} {format_size(each.num_bytes)}" for each in sample.memory if each.owner == name)
    yield name
    yield device.memory or "-"
    yield f"{device.busy:.0%}"
    yield str(device.sync_cores)
    yield str(device.queue_shards)
    yield _share(device.pool_bytes, device.pool_limit_bytes)
    yield format_size(device.reserved_bytes)
    yield device.doing if device.is_silent else ", ".join(reserved)


def _links(links: Sequence[Link], most_rows: int) -> _Rows:
    table = _Rows("link", ">now", ">can", ">used", "algorithm", dispensable=("algorithm", ">can", ">used"))
    for link in _chosen(table, links, lambda each: (each.bytes_per_s,), most_rows):
        is_full = 0 < link.limit_bytes_per_s * _LIMITING_SHARE <= link.bytes_per_s
        table.add(_LIMITING_STYLE if is_full else "", _cells_of_link(link))
    return table


def _cells_of_link(link: Link) -> Iterator[str]:
    limit = link.limit_bytes_per_s
    yield f"{link.source} to {link.target}"
    yield format_rate(link.bytes_per_s)
    yield f"{format_rate(limit)} {link.limit_kind}" if limit else "-"
    yield _share(link.bytes_per_s, limit)
    yield ", ".join(link.algorithms)


def _lines(sample: Sample, events: Sequence[Event]) -> Iterator[Text]:
    if sample.why_slow:
        yield _line(sample.why_slow, _LIMITING_STYLE)
    if missing := ", ".join(not_shown(sample.workers, sample.nodes)):
        yield _line(f"not shown: {missing}; run coarse top there, or see --metrics", "dim")
    for event in events:
        yield _line(describe_event(event), _FAULT_STYLE if event.kind == FAULT else "")


class _Rows:
    """A table that leaves out columns where the terminal is too narrow for all, and then cuts the last one.

    Args:
        columns: Their names; a name that begins with ">" stands above cells that are aligned to the right.
        dispensable: Names of the columns to leave out, the first one first.
    """

    def __init__(self, *columns: str, dispensable: Sequence[str]) -> None:
        self._columns = columns
        self._dispensable = dispensable
        self.rows: list[tuple[str, dict[str, str]]] = []
        """The style of each row, and its cells by column."""
        self.caption = ""

    def add(self, style: str, cells: Iterator[str]) -> None:
        """Adds a row with a cell for each column."""
        self.rows.append((style, dict(zip(self._columns, cells, strict=True))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self._fitting(options.max_width)
        table = Table(
            box=None,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            header_style="bold",
            caption=self.caption or None,
            caption_justify="left",
        )
        for column in columns:
            name = column.removeprefix(">")
            table.add_column(
                name, justify="left" if name == column else "right", no_wrap=column != columns[-1]
            )
        for style, cells in self.rows:
            table.add_row(*(_line(cells[column]) for column in columns), style=style)
        yield table

    def _fitting(self, width: int) -> list[str]:
        columns = list(self._columns)
        for column in self._dispensable:
            if self._least_width(columns) <= width:
                break
            columns.remove(column)
        return columns

    def _least_width(self, columns: Sequence[str]) -> int:
        *others, last = map(self._width, columns)
        is_text = not columns[-1].startswith(">")
        return sum(others) + (min(last, _LEAST_TEXT) if is_text else last) + len(others)

    def _width(self, column: str) -> int:
        return max(map(cell_len, (column.removeprefix(">"), *(cells[column] for _, cells in self.rows))))


def _chosen(
    table: _Rows, items: Sequence[Item], weight: Callable[[Item], tuple[Any, ...]], most_rows: int
) -> Sequence[Item]:
    """The items for which `table` has room, a last line included: those of the greatest weight, in their order."""
    if len(items) <= most_rows:
        return items
    num_kept = most_rows - 1
    table.caption = f"and {len(items) - num_kept} more"
    heaviest = sorted(range(len(items)), key=lambda index: weight(items[index]), reverse=True)
    return [items[index] for index in sorted(heaviest[:num_kept])]


def _line(text: str, style: str = "") -> Text:
    """Text that is cut where it does not fit, so that a row stays a row."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"

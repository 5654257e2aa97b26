"""Reads the parts of a timeline: the events of each process, up to its end, even a sudden one."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from coarse.errors import TimelineError
from coarse.timeline.part_files import EVENTS_SUFFIX, NAMES_SUFFIX, WORKER, GroupNames, Process

# As in coarse/kernels/include/coarse/timeline/recorder.hpp.
_MAGIC = 0x314C544553524F43
_HEADER = struct.Struct("<QQQQ")
_LANE = struct.Struct("<I20s")
_MOST_LANES = 256
_HEADER_BYTES = 8192
_CELL = struct.Struct("<QqqQQIIIHHH6x")
INSTANT = -1
EVERY_TENSOR = 0xFFFFFFFF

(
    SPAN,
    READY,
    PUSH,
    PULL,
    WAIT,
    REDUCE,
    UPDATE,
    REDUCED,
    DIRECT_REDUCE,
    DIRECT_COPY,
    BUFFER,
    SNAPSHOT_COPY,
    SNAPSHOT_WAIT,
    TRANSFER,
    NODE_SEND,
    NODE_RECEIVE,
) = range(16)
"""EventKind of native code."""


class Event(NamedTuple):
    """A TimelineEvent, whose index is `number`; times in nanoseconds of its node's monotonic clock."""

    begin_ns: int
    duration_ns: int
    num_bytes: int
    detail: int
    group: int
    number: int
    step: int
    kind: int
    session: int
    lane: int

    @property
    def end_ns(self) -> int:
        """When it ended; of a moment, when it was."""
        return self.begin_ns + max(0, self.duration_ns)


class Lane(NamedTuple):
    """A thread."""

    thread_id: int
    name: str


@dataclass(slots=True, kw_only=True)
class Part:
    """The part of one process.

    Args:
        process: The process.
        pid, host: Its process id, and its machine's name.
        boot_id: The same for all processes that share its monotonic clock.
        clock_offset_ns: The time since 1970 minus its monotonic clock, in nanoseconds.
        names: Names of spans, by number.
        groups: Tensor groups, by session and number.
        lanes: Threads that have recorded events.
        events: In the order of their begin; of those that begin at once, the longest first.
        num_dropped: Number of older events that were overwritten.
    """

    process: Process
    pid: int
    host: str
    boot_id: str
    clock_offset_ns: int
    names: dict[int, str] = field(default_factory=dict)
    groups: dict[tuple[int, int], GroupNames] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    num_dropped: int = 0


def files_of_parts(folder: Path) -> list[Path]:
    """All files of parts in a folder; () if there is none."""
    suffixes = (EVENTS_SUFFIX, NAMES_SUFFIX)
    return sorted(file for file in folder.glob("*-pid-*") if file.suffix in suffixes)


def read_parts(folder: Path) -> list[Part]:
    """Reads all parts in a folder, workers first.

    Raises:
        TimelineError: If a part is of another version of COARSE.
        OSError: If a file cannot be read.
    """
    parts = [part for file in files_of_parts(folder) if file.suffix == NAMES_SUFFIX for part in _read(file)]
    return sorted(
        parts, key=lambda p: (p.process.role != WORKER, p.process.node, p.process.number, p.process.attempt)
    )


def _read(file: Path) -> Iterator[Part]:
    """The part of a process; none if it ended before it could describe itself."""
    lines = [line for line in map(_parsed, file.read_text(encoding="utf-8").splitlines()) if line]
    if not lines or "process" not in lines[0]:
        return
    try:
        part = _described(lines)
    except (KeyError, TypeError) as error:
        raise TimelineError(f"{file} is of another version of COARSE: {error}") from None
    events = file.with_suffix(EVENTS_SUFFIX)
    if events.exists():
        _read_events(events, part)
    yield part


def _described(lines: list[dict[str, Any]]) -> Part:
    """A part without events."""
    process = lines[0]["process"]
    part = Part(
        pid=process.pop("pid"),
        host=process.pop("host"),
        boot_id=process.pop("boot_id"),
        clock_offset_ns=process.pop("realtime_minus_monotonic_ns"),
        process=Process(**process),
    )
    for line in lines[1:]:
        if "name" in line:
            part.names[line["number"]] = line["name"]
        else:
            group = GroupNames(**line["group"])
            part.groups[group.session, group.group] = group
    return part


def _parsed(line: str) -> dict[str, Any]:
    """A line of names; empty if the process was killed while it wrote the line."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _read_events(file: Path, part: Part) -> None:
    contents = file.read_bytes()
    if len(contents) < _HEADER_BYTES:
        return
    magic, capacity, numbered, num_lanes = _HEADER.unpack_from(contents)
    if magic == 0:
        return  # killed before it recorded anything
    if magic != _MAGIC or len(contents) != _HEADER_BYTES + capacity * _CELL.size:
        raise TimelineError(f"{file} is not a part of a timeline, or of another version of COARSE")
    for lane in range(min(num_lanes, _MOST_LANES)):
        thread_id, name = _LANE.unpack_from(contents, _HEADER.size + lane * _LANE.size)
        part.lanes.append(Lane(thread_id, name.split(b"\0")[0].decode(errors="replace")))
    # Events that were being written as the process was killed lack their commit word.
    used = memoryview(contents)[_HEADER_BYTES : _HEADER_BYTES + min(numbered, capacity) * _CELL.size]
    oldest = max(0, numbered - capacity)
    found = (Event(*cell[1:]) for cell in _CELL.iter_unpack(used) if cell[0] > oldest)
    part.events = sorted(found, key=lambda event: (event.begin_ns, -event.duration_ns))
    part.num_dropped = oldest

"""The parts of a timeline as one trace in Chrome's format, which Perfetto and chrome://tracing open.

Every process of the job is a process of the trace, with its threads. Slices are nested as the work was. Arrows lead
from the push of a tensor's first shard to its reduction, and on to the pull. Links are asynchronous slices, because
their transfers overlap.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO, TypeAlias

from coarse.timeline import parts as kinds
from coarse.timeline.part_files import WORKER, GroupNames
from coarse.timeline.parts import EVERY_TENSOR, INSTANT, Event, Part

TraceEvent: TypeAlias = dict[str, Any]
"""One element of "traceEvents"; `ts` and `dur` in microseconds."""

_PIDS_PER_NODE = 10_000_000  # more than Linux numbers
_MOST_CLIENTS_IN_DETAIL = 64  # Event.detail of a wait has a bit for each
_MOST_BINS = 2000
_LEAST_BIN_NS = 1_000_000

_TENSOR_VERBS = {kinds.READY: "ready", kinds.PUSH: "push", kinds.PULL: "pull"}
_SHARD_VERBS = {kinds.REDUCE: "reduce", kinds.UPDATE: "update", kinds.REDUCED: "reduced"}
_FIXED_NAMES = {
    kinds.DIRECT_REDUCE: "reduce own pieces",
    kinds.DIRECT_COPY: "copy pieces of others",
    kinds.BUFFER: "all-reduce of a buffer",
    kinds.SNAPSHOT_COPY: "keep old version",
    kinds.SNAPSHOT_WAIT: "wait for memory for old versions",
}
_LINK_KINDS = (kinds.TRANSFER, kinds.NODE_SEND, kinds.NODE_RECEIVE)
_WITHOUT_GROUP = (kinds.SPAN, kinds.SNAPSHOT_COPY, kinds.SNAPSHOT_WAIT, kinds.TRANSFER)
_CATEGORIES = {
    kinds.SPAN: "work",
    kinds.READY: "gradient",
    kinds.WAIT: "wait",
    kinds.SNAPSHOT_WAIT: "wait",
    kinds.REDUCE: "sync core",
    kinds.UPDATE: "sync core",
    kinds.REDUCED: "sync core",
    kinds.SNAPSHOT_COPY: "snapshot",
    kinds.TRANSFER: "link",
    kinds.NODE_SEND: "link",
    kinds.NODE_RECEIVE: "link",
}


def write_trace(parts: Sequence[Part], stream: TextIO) -> None:
    """Writes a trace, event by event.

    Args:
        parts: Those of all processes. Clocks of several machines are compared by their time of day.
        stream: Where to write it.
    """
    clock = _Clock(parts)
    stream.write('{"traceEvents":[')
    for number, event in enumerate(_trace_events(parts, clock)):
        stream.write(("," if number else "") + json.dumps(event, separators=(",", ":")))
    stream.write(f'],"displayTimeUnit":"ms","otherData":{json.dumps(_notes(parts, clock))}}}')


def _trace_events(parts: Sequence[Part], clock: _Clock) -> Iterator[TraceEvent]:
    names = _Names(parts)
    for order, part in enumerate(parts):
        yield from _described(part, order)
        yield from _slices(part, clock, names)
        yield from _traffic(part, clock)
    yield from _arrows(parts, clock, names)


def _notes(parts: Sequence[Part], clock: _Clock) -> dict[str, Any]:
    return {
        "producer": "coarse",
        "dropped_events": {_title(part): part.num_dropped for part in parts if part.num_dropped},
        "clock": clock.kind,
    }


# ---- times ----


class _Clock:
    """Puts the clocks of all machines on the first one's, and starts it with the first event."""

    def __init__(self, parts: Sequence[Part]) -> None:
        # One difference for each machine: its processes have read the time of day at different times.
        offsets_ns = {part.boot_id: part.clock_offset_ns for part in reversed(parts)}
        first_ns = parts[0].clock_offset_ns if parts else 0
        self.kind = (
            "monotonic" if len(offsets_ns) <= 1 else "monotonic, shifted by each machine's time of day"
        )
        self._shift_ns = {boot_id: offset_ns - first_ns for boot_id, offset_ns in offsets_ns.items()}
        firsts = [self._shift_ns[part.boot_id] + part.events[0].begin_ns for part in parts if part.events]
        self._start_ns = min(firsts, default=0)

    def ns(self, part: Part, ns: int) -> int:
        """Nanoseconds since the start of the trace."""
        return ns + self._shift_ns[part.boot_id] - self._start_ns

    def us(self, part: Part, ns: int) -> float:
        """The same in microseconds, as traces have it."""
        return self.ns(part, ns) / 1000


# ---- names ----


class _Names:
    """Finds the names of tensor groups: memory devices know only numbers, and workers know the names."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._of_device: dict[tuple[str, int, int], GroupNames] = {}
        self._pushed_ns: dict[tuple[Any, ...], int] = {}  # by group, tensor, step and rank
        for part in parts:
            for group in part.groups.values():
                for pid in group.device_pids:
                    self._of_device[part.host, pid, group.group] = group
            self._note_pushes(part)

    def _note_pushes(self, part: Part) -> None:
        for event in part.events:
            if event.kind == kinds.PUSH and (group := self.group(part, event)) is not None:
                key = *self.key(part, group), event.number, event.step, part.process.number
                self._pushed_ns[key] = event.end_ns

    def group(self, part: Part, event: Event) -> GroupNames | None:
        """The group of an event; None if it has none, or if its worker was killed before it could name it."""
        if event.kind in _WITHOUT_GROUP:
            return None
        if part.process.role == WORKER:
            return part.groups.get((event.session, event.group))
        return self._of_device.get((part.host, part.pid, event.group))

    def key(self, part: Part, group: GroupNames) -> tuple[str, tuple[int, ...], int]:
        """A key of the group that its workers and memory devices share."""
        return part.host, tuple(group.device_pids), group.group

    def late_ranks(self, part: Part, group: GroupNames, event: Event) -> list[int]:
        """The other workers for which a wait began to wait: those that had not finished their push.

        The event says whose contributions memory devices had not taken; some of these may have pushed nevertheless.
        """
        tensor = _tensor_of(group, event.number)
        late = []
        for client, rank in enumerate(group.ranks[:_MOST_CLIENTS_IN_DETAIL]):
            key = *self.key(part, group), tensor, event.step, rank
            is_missing = event.detail >> client & 1 and rank != part.process.number
            if is_missing and self._pushed_ns.get(key, event.end_ns) > event.begin_ns:
                late.append(rank)
        return late


def _title(part: Part) -> str:
    process = part.process
    name = f"worker {process.number}" if process.role == WORKER else f"memory device md{process.number}"
    node = f" of node {process.node}" if process.node else ""
    attempt = f" (restart {process.attempt})" if process.attempt else ""
    return f"{name}{node}{attempt}"


def _tensor_name(group: GroupNames | None, event: Event) -> str:
    if group is None:
        return f"tensor {event.number} of group {event.group}"
    if event.number == EVERY_TENSOR:
        return f"all of {group.name}"
    return group.tensors[event.number] if event.number < len(group.tensors) else f"tensor {event.number}"


def _tensor_of(group: GroupNames, shard: int) -> int:
    return group.tensor_of_shard[shard] if shard < len(group.tensor_of_shard) else -1


def _shard_name(group: GroupNames | None, event: Event) -> str:
    tensor = -1 if group is None else _tensor_of(group, event.number)
    if group is None or tensor < 0:
        return f"shard {event.number} of group {event.group}"
    first = bisect.bisect_left(group.tensor_of_shard, tensor)
    count = bisect.bisect_right(group.tensor_of_shard, tensor) - first
    number = f" [{event.number - first + 1}/{count}]" if count > 1 else ""
    return f"{group.tensors[tensor]}{number}"


def _reason(late_ranks: Sequence[int]) -> str:
    """The reason of a wait: workers that had not pushed as it began, or else what follows."""
    if not late_ranks:
        return "memory devices"
    return f"worker{'s' if len(late_ranks) > 1 else ''} {', '.join(map(str, late_ranks))}"


def _name(part: Part, event: Event, group: GroupNames | None, names: _Names) -> str:
    if event.kind == kinds.SPAN:
        return part.names.get(event.number, f"name {event.number}")
    if event.kind in _TENSOR_VERBS:
        return f"{_TENSOR_VERBS[event.kind]} {_tensor_name(group, event)}"
    if event.kind in _SHARD_VERBS:
        return f"{_SHARD_VERBS[event.kind]} {_shard_name(group, event)}"
    if event.kind == kinds.WAIT:
        return f"wait for {_reason(names.late_ranks(part, group, event) if group else [])}"
    if event.kind == kinds.TRANSFER:
        source, target = event.detail >> 16, event.detail & 0xFFFF
        return f"{_endpoint(part, source)} to {_endpoint(part, target)}"
    if event.kind in (kinds.NODE_SEND, kinds.NODE_RECEIVE):
        verb = "to" if event.kind == kinds.NODE_SEND else "from"
        return f"{verb} node {event.detail}: {_shard_name(group, event)}"
    return _FIXED_NAMES.get(event.kind, f"event {event.kind}")


def _endpoint(part: Part, number: int) -> str:
    count = part.process.num_clients
    return f"worker {number}" if number < count else f"md{number - count}"


# ---- processes, threads, slices ----


def _pid(part: Part) -> int:
    return part.process.node * _PIDS_PER_NODE + part.pid


def _tid(part: Part, event: Event) -> int:
    return part.lanes[event.lane].thread_id if event.lane < len(part.lanes) else 0


def _metadata(part: Part, kind: str, tid: int = 0, /, **arguments: Any) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": _pid(part), "tid": tid, "args": arguments}


def _described(part: Part, order: int) -> Iterator[TraceEvent]:
    yield _metadata(part, "process_name", name=_title(part))
    yield _metadata(part, "process_labels", labels=f"pid {part.pid} on {part.host}")
    yield _metadata(part, "process_sort_index", sort_index=order)
    for number, lane in enumerate(part.lanes):
        is_main = lane.thread_id == part.pid
        yield _metadata(part, "thread_name", lane.thread_id, name="main thread" if is_main else lane.name)
        yield _metadata(part, "thread_sort_index", lane.thread_id, sort_index=-1 if is_main else number)


def _slices(part: Part, clock: _Clock, names: _Names) -> Iterator[TraceEvent]:
    if part.num_dropped and part.events:
        yield _instant(
            part, clock, part.events[0], f"{part.num_dropped} older events were dropped", {}, scope="p"
        )
    ends_ns: dict[int, list[int]] = defaultdict(list)
    for number, event in enumerate(part.events):
        group = names.group(part, event)
        name, arguments = _name(part, event, group, names), _arguments(event, group)
        if event.duration_ns == INSTANT:
            yield _instant(part, clock, event, name, arguments)
        elif event.kind in _LINK_KINDS or not _is_nested(event, ends_ns[event.lane]):
            yield from _asynchronous(part, clock, event, name, arguments, number)
        else:
            yield _event(part, clock, event, "X", name) | {
                "dur": event.duration_ns / 1000,
                "args": arguments,
            }


def _is_nested(event: Event, ends_ns: list[int]) -> bool:
    """Whether a slice lies within those of its thread around it, unlike those of two models that one backward trains.

    Args:
        event: In the order of their begin.
        ends_ns: Ends of the slices around it, the innermost one last; this one is added.
    """
    while ends_ns and ends_ns[-1] <= event.begin_ns:
        ends_ns.pop()
    if ends_ns and event.end_ns > ends_ns[-1]:
        return False
    ends_ns.append(event.end_ns)
    return True


def _event(part: Part, clock: _Clock, event: Event, phase: str, name: str) -> TraceEvent:
    return {
        "ph": phase,
        "name": name,
        "cat": _CATEGORIES.get(event.kind, "coarse"),
        "pid": _pid(part),
        "tid": _tid(part, event),
        "ts": clock.us(part, event.begin_ns),
    }


def _instant(
    part: Part, clock: _Clock, event: Event, name: str, arguments: Mapping[str, Any], *, scope: str = "t"
) -> TraceEvent:
    return _event(part, clock, event, "i", name) | {"s": scope, "args": arguments}


def _asynchronous(
    part: Part, clock: _Clock, event: Event, name: str, arguments: Mapping[str, Any], number: int
) -> Iterator[TraceEvent]:
    shared = {"id": f"{_pid(part)}.{number}"}
    yield _event(part, clock, event, "b", name) | shared | {"args": arguments}
    yield _event(part, clock, event, "e", name) | shared | {"ts": clock.us(part, event.end_ns)}


def _arguments(event: Event, group: GroupNames | None) -> dict[str, Any]:
    if event.kind == kinds.SPAN:
        return {}
    arguments: dict[str, Any] = {"bytes": event.num_bytes} if event.num_bytes else {}
    if event.step:
        arguments["step"] = event.step
    if group is not None:
        arguments["group"] = group.name
    if event.kind == kinds.WAIT:
        arguments["shard"] = _shard_name(group, event)
    if event.kind in _SHARD_VERBS:
        arguments["shard"] = event.number
    return arguments


# ---- traffic ----


def _traffic(part: Part, clock: _Clock) -> Iterator[TraceEvent]:
    """Counts the bytes that a worker hands over and takes back, as a rate."""
    moved = [event for event in part.events if event.kind in (kinds.PUSH, kinds.PULL) and event.num_bytes]
    if not moved:
        return
    length_ns = max(event.end_ns for event in moved) - moved[0].begin_ns
    bin_ns = max(_LEAST_BIN_NS, length_ns // _MOST_BINS)
    bins: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for event in moved:
        bins[clock.ns(part, event.end_ns) // bin_ns][event.kind == kinds.PULL] += event.num_bytes
    for number in sorted({*bins, *(each + 1 for each in bins)}):
        pushed, pulled = bins.get(number, (0, 0))
        yield {
            "ph": "C",
            "name": "link traffic (GB/s)",
            "pid": _pid(part),
            "tid": 0,
            "ts": number * bin_ns / 1000,
            "args": {"push": pushed / bin_ns, "pull": pulled / bin_ns},
        }


# ---- arrows ----


@dataclass(slots=True)
class _Way:
    """One step of a tensor's first shard: from the workers' pushes to their pulls."""

    pushes: list[tuple[Part, Event]] = field(default_factory=list)
    reductions: list[tuple[Part, Event]] = field(default_factory=list)
    pulls: list[tuple[Part, Event]] = field(default_factory=list)


class _Pulls:
    """The pulls of a worker that took all tensors of a group, by their ends."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        self._events.append(event)

    def first_after(self, ns: int) -> Event | None:
        position = bisect.bisect_left(self._events, ns, key=lambda event: event.end_ns)
        return self._events[position] if position < len(self._events) else None


def _arrows(parts: Sequence[Part], clock: _Clock, names: _Names) -> Iterator[TraceEvent]:
    ways: dict[tuple[Any, ...], _Way] = defaultdict(_Way)
    whole: dict[tuple[Any, ...], _Pulls] = defaultdict(_Pulls)
    for part in parts:
        for event in part.events:
            group = names.group(part, event)
            if group is None:
                continue
            key = names.key(part, group)
            if event.kind == kinds.PULL and event.number == EVERY_TENSOR:
                whole[key, id(part)].add(event)
            elif event.kind in (kinds.PUSH, kinds.PULL):
                way = ways[key, event.number, event.step]
                (way.pushes if event.kind == kinds.PUSH else way.pulls).append((part, event))
            elif event.kind in _SHARD_VERBS and _is_first(group, event.number):
                tensor = _tensor_of(group, event.number)
                ways[key, tensor, event.step].reductions.append((part, event))
    numbers = itertools.count(1)
    for (key, *_), way in ways.items():
        yield from _arrows_of(way, clock, functools.partial(_pulls_of, whole, key), numbers)


def _pulls_of(whole: Mapping[tuple[Any, ...], _Pulls], key: tuple[Any, ...], part: Part) -> _Pulls:
    return whole[key, id(part)]


def _is_first(group: GroupNames, shard: int) -> bool:
    tensor = _tensor_of(group, shard)
    return tensor >= 0 and (shard == 0 or _tensor_of(group, shard - 1) != tensor)


def _arrows_of(
    way: _Way, clock: _Clock, whole: Callable[[Part], _Pulls], numbers: Iterator[int]
) -> Iterator[TraceEvent]:
    if not way.reductions:
        return
    device, reduction = way.reductions[0]
    pulls = {id(part): event for part, event in way.pulls}
    for part, push in way.pushes:
        pull = pulls.get(id(part)) or whole(part).first_after(reduction.end_ns)
        if pull is None or pull.duration_ns <= 0:
            continue
        arrow = {"name": "shard", "cat": "shard", "id": next(numbers)}
        # Inside of the pull's slice, whose end is exclusive.
        arrival_ns = min(max(reduction.end_ns, pull.begin_ns), pull.end_ns - 1)
        yield _event(part, clock, push, "s", "shard") | arrow
        yield _event(device, clock, reduction, "t", "shard") | arrow
        at_pull = _event(part, clock, pull, "f", "shard") | arrow
        yield at_pull | {"bp": "e", "ts": clock.us(part, arrival_ns)}

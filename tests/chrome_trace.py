"""A strict reader of traces in Chrome's format: it refuses what Perfetto would drop, repair or draw wrongly."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PHASES = {
    "M": {"args"},
    "X": {"ts", "dur", "cat"},
    "i": {"ts", "s", "cat"},
    "C": {"ts", "args"},
    "b": {"ts", "id", "cat"},
    "e": {"ts", "id", "cat"},
    "s": {"ts", "id", "cat"},
    "t": {"ts", "id", "cat"},
    "f": {"ts", "id", "cat", "bp"},
}
"""Phases that may occur, with the keys that each needs besides those of all events."""


class TraceFormatError(ValueError):
    """A trace is not as the format wants it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A slice or, with begin_ns == end_ns, a moment; times in nanoseconds since the start of the trace."""

    process: str
    thread: str
    name: str
    category: str
    begin_ns: int
    end_ns: int
    arguments: dict[str, Any]


@dataclass(slots=True)
class Trace:
    """What is in a trace."""

    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    moments: list[Slice] = field(default_factory=list)
    transfers: list[Slice] = field(default_factory=list)
    counters: set[tuple[str, str]] = field(default_factory=set)
    arrows: list[list[Slice]] = field(default_factory=list)
    """For each arrow the slices that it connects."""
    notes: dict[str, Any] = field(default_factory=dict)

    def named(self, prefix: str, process: str = "") -> list[Slice]:
        """Slices whose names begin so, of all processes or of one."""
        return [
            each for each in self.slices if each.name.startswith(prefix) and process in ("", each.process)
        ]


def read_trace(path: Path) -> Trace:
    """Reads a trace.

    Raises:
        TraceFormatError: If an event lacks a key, has a value of a wrong type or a negative time; if a process or
            thread has no name; if slices of a thread overlap without being nested; if an asynchronous slice has no
            end; if an arrow goes back in time or begins or ends outside of slices.
    """
    contents = path.read_bytes()
    value = json.loads(gzip.decompress(contents) if path.suffix == ".gz" else contents)
    if not isinstance(value.get("traceEvents"), list):
        raise TraceFormatError("a trace is an object with a list traceEvents")
    events = value["traceEvents"]
    trace = Trace(notes=value["otherData"])
    for event in events:
        _check(event)
        if event["ph"] == "M":
            _take_name(trace, event)
    by_phase = defaultdict(list)
    for event in events:
        by_phase[event["ph"]].append(event)
    for event in (event for phase in "XibestfC" for event in by_phase[phase]):
        if event["pid"] not in trace.processes:
            raise TraceFormatError(f"process {event['pid']} has no name: {event}")
        if event["ph"] != "C" and (event["pid"], event["tid"]) not in trace.threads:
            raise TraceFormatError(f"thread {event['tid']} has no name: {event}")
    trace.slices = [_slice(trace, event, event["dur"]) for event in by_phase["X"]]
    trace.moments = [_slice(trace, event, 0) for event in by_phase["i"]]
    trace.counters = {(trace.processes[event["pid"]], event["name"]) for event in by_phase["C"]}
    of_thread = defaultdict(list)
    for event, each in zip(by_phase["X"], trace.slices, strict=True):
        of_thread[event["pid"], event["tid"]].append(each)
    for slices in of_thread.values():
        _check_nested(slices)
    trace.transfers = _joined(trace, by_phase["b"], by_phase["e"])
    trace.arrows = _arrows(trace, [*by_phase["s"], *by_phase["t"], *by_phase["f"]], of_thread)
    return trace


def _check(event: dict[str, Any]) -> None:
    phase = event.get("ph")
    if phase not in PHASES:
        raise TraceFormatError(f"unknown phase: {event}")
    if missing := ({"name", "pid", "tid"} | PHASES[phase]) - event.keys():
        raise TraceFormatError(f"{sorted(missing)} are missing: {event}")
    if not isinstance(event["name"], str) or not event["name"]:
        raise TraceFormatError(f"a name is a text: {event}")
    if not all(type(event[key]) is int and event[key] >= 0 for key in ("pid", "tid")):
        raise TraceFormatError(f"numbers of processes and threads are whole numbers: {event}")
    for key in event.keys() & {"ts", "dur"}:
        if type(event[key]) not in (int, float) or not 0 <= event[key] < float("inf"):
            raise TraceFormatError(f"{key} is not a time: {event}")
    if not isinstance(event.get("args", {}), dict):
        raise TraceFormatError(f"args are an object: {event}")
    if phase == "C" and not all(type(each) in (int, float) for each in event["args"].values()):
        raise TraceFormatError(f"a counter has numbers: {event}")


def _take_name(trace: Trace, event: dict[str, Any]) -> None:
    if event["name"] == "process_name":
        if trace.processes.setdefault(event["pid"], event["args"]["name"]) != event["args"]["name"]:
            raise TraceFormatError(f"a process has two names: {event}")
    elif event["name"] == "thread_name":
        trace.threads[event["pid"], event["tid"]] = event["args"]["name"]


def _slice(trace: Trace, event: dict[str, Any], dur: float) -> Slice:
    begin_ns = round(event["ts"] * 1000)
    return Slice(
        process=trace.processes[event["pid"]],
        thread=trace.threads[event["pid"], event["tid"]],
        name=event["name"],
        category=event["cat"],
        begin_ns=begin_ns,
        end_ns=begin_ns + round(dur * 1000),
        arguments=event.get("args", {}),
    )


def _check_nested(slices: list[Slice]) -> None:
    open_slices: list[Slice] = []
    for each in sorted(slices, key=lambda each: (each.begin_ns, -each.end_ns)):
        while open_slices and open_slices[-1].end_ns <= each.begin_ns:
            open_slices.pop()
        if open_slices and each.end_ns > open_slices[-1].end_ns:
            raise TraceFormatError(f"{each} begins in {open_slices[-1]}, and ends after it")
        open_slices.append(each)


def _joined(trace: Trace, begins: list[dict[str, Any]], ends: list[dict[str, Any]]) -> list[Slice]:
    def key(event: dict[str, Any]) -> tuple[Any, ...]:
        return event["pid"], event["cat"], event["id"], event["name"]

    end_of = {key(event): event for event in ends}
    if len(end_of) != len(ends) or {key(event) for event in begins} != end_of.keys():
        raise TraceFormatError("an asynchronous slice has not one begin and one end")
    slices = [_slice(trace, event, end_of[key(event)]["ts"] - event["ts"]) for event in begins]
    for each in slices:
        if each.end_ns < each.begin_ns:
            raise TraceFormatError(f"{each} ends before it begins")
    return slices


def _arrows(
    trace: Trace, events: list[dict[str, Any]], of_thread: dict[tuple[int, int], list[Slice]]
) -> list[list[Slice]]:
    by_id = defaultdict(list)
    for event in events:
        by_id[event["id"]].append(event)
    arrows = []
    for steps in by_id.values():
        steps.sort(key=lambda event: (round(event["ts"] * 1000), "stf".index(event["ph"])))
        if [event["ph"] for event in steps] != ["s", *"t" * (len(steps) - 2), "f"]:
            raise TraceFormatError(f"an arrow does not lead from s to f: {steps}")
        arrows.append(
            [_around(of_thread[event["pid"], event["tid"]], round(event["ts"] * 1000)) for event in steps]
        )
    return arrows


def _around(slices: list[Slice], ns: int) -> Slice:
    """The innermost slice at a time, to which Perfetto binds an arrow."""
    around = [each for each in slices if each.begin_ns <= ns < each.end_ns]
    if not around:
        raise TraceFormatError(f"an arrow ends at {ns} ns, outside of slices")
    return min(around, key=lambda each: each.end_ns - each.begin_ns)

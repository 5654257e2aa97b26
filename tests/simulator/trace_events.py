"""A strict reader of the Trace Event Format's JSON object form, as far as timelines use it."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
KEYS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
}


def read_rows(document):
    """Complete events by process and row name, after checks of every event.

    Raises:
        ValueError: If an event has a missing, unknown or impossible field; a process or row has no name or two; a
            name is used twice; or events of a row overlap or are out of order.
    """
    _check(set(document) == {"traceEvents", "displayTimeUnit", "otherData"}, "object", document.keys())
    _check(document["displayTimeUnit"] in ("ms", "ns"), "unit", document["displayTimeUnit"])
    names, events = defaultdict(dict), defaultdict(list)
    for event in document["traceEvents"]:
        _check(event.get("ph") in KEYS, "phase", event)
        _check(set(event) == KEYS[event["ph"]], "fields", event)
        _check(type(event["pid"]) is int and type(event["tid"]) is int, "process or row", event)
        _check(isinstance(event["name"], str) and event["name"], "name", event)
        if event["ph"] == "M":
            _read_metadata(event, names)
        else:
            _check_complete(event)
            events[event["pid"], event["tid"]].append(event)
    processes = {
        process: {
            names["thread_name"].pop((pid, row)): events.pop((pid, row), [])
            for row in sorted(row for of, row in names["thread_name"] if of == pid)
        }
        for (pid, _), process in names["process_name"].items()
    }
    _check(not names["thread_name"], "rows of no process", names["thread_name"])
    _check(not events, "events of a row without a name", list(events))
    for rows in processes.values():
        _check_rows(rows)
    return processes


def _read_metadata(event, names):
    _check(event["name"] in METADATA, "metadata", event)
    key, kind = METADATA[event["name"]]
    _check(set(event["args"]) == {key} and isinstance(event["args"][key], kind), "arguments", event)
    place = event["pid"], event["tid"]
    _check(place not in names[event["name"]], "second name", event)
    if kind is str:
        scope = [name for (pid, _), name in names[event["name"]].items() if pid == event["pid"]]
        _check(event["args"][key] not in scope, "name used twice", event)
    names[event["name"]][place] = event["args"][key]


def _check_complete(event):
    times = event["ts"], event["dur"]
    _check(all(type(time) in (int, float) and math.isfinite(time) for time in times), "times", event)
    _check(min(times) >= 0, "times", event)
    _check(all(type(value) in (int, float, str) for value in event["args"].values()), "arguments", event)


def _check_rows(rows):
    for name, events in rows.items():
        for one, other in pairwise(events):
            _check(one["ts"] + one["dur"] <= other["ts"] + 1e-6, f"overlap on {name}", (one, other))


def _check(holds, what, found):
    if not holds:
        raise ValueError(f"{what}: {found}")

"""Checks that JSON values are a sample, so that no recording and no process can break the page."""

from __future__ import annotations

import functools
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from coarse.dashboard.samples import (
    AWAITED,
    CHECKPOINT,
    FAULT,
    JOB,
    OVER,
    ROUTE,
    RUNS,
    SILENT,
    STARTS,
    TRAINS,
    WAITS,
    Event,
    Sample,
    Worker,
)

_MOST_ITEMS = 1 << 14
_LARGEST = 1 << 53  # from here on, JavaScript's numbers skip integers
_LONGEST_SHOWN = 40  # characters of a wrong value in an error

_CHOICES = {
    (Sample, "phase"): (AWAITED, RUNS, OVER),
    (Worker, "state"): (STARTS, TRAINS, WAITS, SILENT),
    (Event, "kind"): (FAULT, JOB, CHECKPOINT, ROUTE),
}


class SampleError(ValueError):
    """Values are no sample.

    Args:
        problem: The fault of one of them, in words.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place = ""

    def __str__(self) -> str:
        return f"{self.place.lstrip('.') or 'it'} {self.problem}"


def check_sample(values: Any) -> None:
    """Checks that values are those of a Sample: all fields with their types, usual numbers, lists of usual lengths.

    Raises:
        SampleError: If they are not; names the field.
    """
    _check(values, Sample)


def _check(value: Any, kind: Any) -> None:
    if is_dataclass(kind):
        _check_fields(value, kind)
    elif get_origin(kind) is tuple:
        _check_items(value, get_args(kind)[0])
    elif get_origin(kind) is dict:
        _check_entries(value, get_args(kind)[1])
    elif kind is float:
        _check_number(value, (int, float), "a usual number")
    elif kind is int:
        _check_number(value, (int,), "a usual integer")
    else:
        _require(isinstance(value, kind), value, {str: "text", bool: "true or false"}[kind])


def _check_fields(values: Any, kind: Any) -> None:
    _require(isinstance(values, dict), values, "an object")
    for name, own in _fields(kind).items():
        if name not in values:
            raise SampleError(f"lacks {name!r}")
        try:
            _check(values[name], own)
            choices = _CHOICES.get((kind, name))
            _require(choices is None or values[name] in choices, values[name], " or ".join(choices or ()))
        except SampleError as error:
            error.place = f".{name}{error.place}"
            raise


def _check_items(items: Any, kind: Any) -> None:
    _require(isinstance(items, list), items, "an array")
    if len(items) > _MOST_ITEMS:
        raise SampleError(f"has {len(items)} items, more than {_MOST_ITEMS}")
    _check_each(enumerate(items), kind)


def _check_entries(entries: Any, kind: Any) -> None:
    _require(isinstance(entries, dict), entries, "an object")
    if len(entries) > _MOST_ITEMS:
        raise SampleError(f"has {len(entries)} entries, more than {_MOST_ITEMS}")
    _check_each(entries.items(), kind)


def _check_each(entries: Any, kind: Any) -> None:
    for name, value in entries:
        try:
            _check(value, kind)
        except SampleError as error:
            error.place = f"[{name!r:.{_LONGEST_SHOWN}}]{error.place}"
            raise


def _check_number(value: Any, kinds: tuple[type, ...], what: str) -> None:
    _require(type(value) in kinds and abs(value) <= _LARGEST, value, what)


def _require(is_met: bool, value: Any, what: str) -> None:
    if not is_met:
        raise SampleError(f"is {value!r:.{_LONGEST_SHOWN}}, not {what}")


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)

"""The samples of a job for the page, oldest first, and their recording in a file."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from coarse.dashboard.sample_validation import SampleError, check_sample
from coarse.dashboard.samples import Sample
from coarse.errors import CoarseError

logger = logging.getLogger(__name__)

Values: TypeAlias = dict[str, Any]
"""A sample as JSON values."""

MOST_SAMPLES = 600
_MOST_EVENTS = 1000

_HEADER = {"format": "coarse-dashboard", "version": 1}
_DIGITS = 4
_LONGEST_LINE = 4 << 20
_MOST_CHARACTERS = 384 << 20  # browsers read at most 512 Mi at once


class RecordingError(CoarseError):
    """A file is not a recording of the dashboard."""


def as_values(sample: Sample) -> Values:
    """A sample as JSON values; figures other than times of day have four digits."""
    return {name: value if name == "time_s" else _rounded(value) for name, value in asdict(sample).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {name: each if name == "time_s" else _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


class History:
    """The samples and events that the page shows; safe from any thread.

    It holds at most `most_samples`, spread evenly over the job, and the newest one: when there are more, it drops
    every second one and takes new ones half as often.

    Args:
        most_samples: Limit of their number, which is even.
    """

    def __init__(self, most_samples: int = MOST_SAMPLES) -> None:
        self._most = most_samples
        self._samples: list[Values] = []
        self._events: deque[Values] = deque(maxlen=_MOST_EVENTS)
        self._num_events = 0
        self._stride = 1
        self._num_added = 0
        self._lock = threading.Lock()

    def add(self, sample: Values) -> None:
        """Adds the newest sample, and its events, which get the number of the sample and an id of their own."""
        number = sample["number"]
        with self._lock:
            for event in sample["events"]:
                self._num_events += 1
                self._events.append({**event, "number": number, "id": self._num_events})
            if self._num_added and (self._num_added - 1) % self._stride:  # the newest was taken between two
                self._samples.pop()
            self._samples.append({**sample, "events": []})
            self._num_added += 1
            if len(self._samples) > self._most:
                self._stride *= 2
                self._samples = self._samples[::2]

    def after(self, number: int) -> tuple[list[Values], list[Values]]:
        """The samples whose number is larger than `number`, and the events with such a number."""
        with self._lock:
            samples, events = (
                [each for each in kept if each["number"] > number] for kept in (self._samples, self._events)
            )
        return samples, events

    @property
    def last_number(self) -> int:
        """Number of the newest sample; 0 before the first one."""
        with self._lock:
            return int(self._samples[-1]["number"]) if self._samples else 0


class Recorder:
    """Writes samples to a file, one line of JSON each; a killed recorder leaves all lines but the last one whole.

    Args:
        path: The file, which is overwritten.

    Raises:
        OSError: If it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._write(_HEADER)

    def add(self, sample: Values) -> None:
        """Writes one sample.

        Raises:
            OSError: If it cannot be written.
        """
        self._write(sample)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()

    def _write(self, values: Values) -> None:
        self._file.write(json.dumps(values, separators=(",", ":")) + "\n")
        self._file.flush()


def open_recording(path: Path) -> History:
    """Reads the samples of a recorded job. A last line without its end, as a killed recorder leaves it, is left out.

    Raises:
        OSError: If the file cannot be read.
        RecordingError: If it is not a recording, or too large for a page; names the line.
    """
    history = History()
    with path.open(encoding="utf-8", errors="replace") as file:
        for sample in _samples(_lines(file, path), path):
            history.add(sample)
    if not history.last_number:
        raise RecordingError(f"{path}: the recording has no sample")
    return history


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The whole lines of a file, none of them so long that a page could not show as many as it may get."""
    longest = 0
    for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE + 1), ""), 1):
        longest = max(longest, len(line))
        if longest > _LONGEST_LINE or longest * min(number, MOST_SAMPLES) > _MOST_CHARACTERS:
            raise RecordingError(
                f"{path}: line {number}: with lines of {longest} characters or more, it is too large for a "
                "page; it is no recording of the dashboard"
            )
        if line.endswith("\n"):
            yield line
        else:
            logger.warning("%s: line %d is cut off, and left out", path, number)


def _samples(lines: Iterable[str], path: Path) -> Iterator[Values]:
    last = 0
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line, parse_constant=_refuse)
            if number > 1:
                check_sample(values)
                _check_order(values["number"], last)
        except SampleError as error:
            raise RecordingError(f"{path}: line {number} is no sample of the dashboard: {error}") from None
        except (ValueError, RecursionError):
            raise RecordingError(
                f"{path}: line {number} is not JSON; it is no recording of the dashboard"
            ) from None
        if number > 1:
            last = values["number"]
            yield values
        elif values != _HEADER:
            raise RecordingError(
                f"{path}: no recording of this version of the dashboard: it begins with {line[:80]!r}"
            )


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")  # Python's reader has: NaN, Infinity


def _check_order(number: int, last: int) -> None:
    if number <= last:
        raise SampleError(f"has the number {number}, after {last}")

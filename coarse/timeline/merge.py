"""Merges the parts of a timeline into one file."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coarse.errors import TimelineError
from coarse.timeline.chrome_trace import write_trace
from coarse.timeline.part_files import parts_folder
from coarse.timeline.parts import Part, files_of_parts, read_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A trace that was written.

    Args:
        num_processes: Processes that have recorded.
        num_events: Events of all processes.
        num_dropped: Older events that were overwritten.
    """

    num_processes: int
    num_events: int
    num_dropped: int

    def __str__(self) -> str:
        dropped = f"; {self.num_dropped} older events were dropped (COARSE_TIMELINE_EVENTS)"
        return (
            f"{self.num_events} events of {self.num_processes} processes{dropped if self.num_dropped else ''}"
        )


def merge(target: Path, *, keeps_parts: bool = False) -> Merged:
    """Writes the trace `target` from the parts in the same folder, and removes them.

    Args:
        target: A name that ends in ".gz" is compressed.
        keeps_parts: Whether to leave the parts.

    Raises:
        TimelineError: If there are no parts, or they cannot be read.
        OSError: If the trace cannot be written.
    """
    folder = parts_folder(target)
    parts = read_parts(folder)
    if not parts:
        raise TimelineError(f"{folder} has no parts of a timeline: no process of the job recorded any event")
    _write(target, parts)
    if not keeps_parts:
        remove_parts(target)
    return Merged(
        num_processes=len(parts),
        num_events=sum(len(part.events) for part in parts),
        num_dropped=sum(part.num_dropped for part in parts),
    )


def remove_parts(target: Path) -> None:
    """Removes the parts of a trace, and their folder if nothing else is in it."""
    folder = parts_folder(target)
    for file in files_of_parts(folder):
        file.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _write(target: Path, parts: Sequence[Part]) -> None:
    """Writes the trace whole or not at all."""
    unfinished = target.with_name(f"{target.name}.unfinished")
    try:
        if target.suffix == ".gz":
            with gzip.open(unfinished, "wt", compresslevel=6, encoding="utf-8") as stream:
                write_trace(parts, stream)
        else:
            with unfinished.open("w", encoding="utf-8") as stream:
                write_trace(parts, stream)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)

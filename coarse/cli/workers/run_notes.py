"""The lines of `coarse run` about the job itself: what its session has decided, and a summary at the end."""

from __future__ import annotations

from collections.abc import Sequence

from coarse.cli.display.tables import format_size
from coarse.status.launcher_notes import Note

_LONGEST_REASON = 200


class RunNotes:
    """Collects the workers' notes of one run.

    Args:
        is_quiet: Whether nothing is to be shown.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._has_started = False
        self._ends: dict[int, Note] = {}

    def take(self, notes: Sequence[Note]) -> list[str]:
        """Takes notes; returns the lines to show now, those of the first session's start."""
        lines: list[str] = []
        for note in notes:
            if isinstance(note.get("decisions"), list) and not self._has_started:
                self._has_started = True
                lines += [str(each)[:_LONGEST_REASON] for each in note["decisions"]]
            if isinstance(note.get("ended"), int) and isinstance(note.get("steps"), int):
                before = self._ends.get(note["ended"])
                if before is None or before["steps"] <= note["steps"]:  # a program may have several sessions
                    self._ends[note["ended"]] = note
        return [] if self._is_quiet else lines

    def summary(self, num_restarts: int, failed: Sequence[str], changes: Sequence[str] = ()) -> str:
        """The job in one line; "" if no session has ended, or nothing is to be shown.

        Args:
            num_restarts: Restarts of all workers.
            failed: The workers that have failed, in words.
            changes: The workers that have joined, and left as planned, in words.
        """
        if self._is_quiet or not self._ends:
            return ""
        faults = [*failed, *([f"{num_restarts} restart(s)"] if num_restarts else [])]
        parts = [
            _describe_pace(self._ends),
            _describe_memory(self._ends),
            f"faults: {', '.join(faults) or 'none'}",
            *([", ".join(changes)] if changes else []),
        ]
        return "; ".join(parts)


def _describe_pace(ends: dict[int, Note]) -> str:
    steps, seconds = max((note["steps"], note["seconds"]) for note in ends.values())
    rates = [f"{steps / seconds:.3g} steps/s"] if steps and seconds > 0 else []
    if (samples := _sum(ends, "samples")) and seconds > 0:
        rates.append(f"{samples / seconds:.3g} samples/s")
    pace = f" ({', '.join(rates)})" if rates else ""
    steps_s = _sum(ends, "steps_s")
    blocked = f", blocked {min(1.0, _sum(ends, 'blocked_s') / steps_s):.0%} of the time" if steps_s else ""
    return f"{steps} steps in {seconds:.1f} s{pace}{blocked}"


def _describe_memory(ends: dict[int, Note]) -> str:
    """Resident memory, in which each process counts the memory that it shares."""
    worker = max(note["peak_bytes"] for note in ends.values())
    device = max(note.get("device_peak_bytes", 0) for note in ends.values())
    return f"peak memory {format_size(worker)} per worker" + (
        f", {format_size(device)} per memory device" if device else ""
    )


def _sum(ends: dict[int, Note], name: str) -> float:
    return float(sum(note.get(name, 0.0) for note in ends.values()))

"""Finds the worker that failed first, and its last error."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from coarse.cli.workers.output import TRACEBACK_HEADER
from coarse.errors import FOLLOW_UP

_TRACEBACK = TRACEBACK_HEADER.decode()
_CHAIN_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FOLLOWS_ANOTHER = re.compile(
    r"^(?:[\w.]+\.)?WorkerLostError\b"
    r"|\bWorkerLostError: "  # within an error of TensorFlow
    rf"|{re.escape(FOLLOW_UP)}"
    r"|^(?:[\w.]+\.)?DistNetworkError\b"  # torch's error if the store of worker 0 is gone
    r"|^RuntimeError: .*Connection (?:closed|reset) by peer"  # Gloo's error if a worker is gone
    r"|: rank \d+ (?:died|has left the group|cannot be reached any more)",  # from the backend "coarse"
    re.MULTILINE,
)
_LINES_WITHOUT_TRACEBACK = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How a worker ended.

    Args:
        rank: Rank of the worker.
        pid: Its former process id.
        returncode: Exit code, or minus the signal that killed it.
        stderr_tail: The end of its stderr; empty if stderr was not captured.
        was_stopped: Whether the launcher had stopped it before it ended.
        evidence: Evidence for the reason why it was killed; "" if there is none.
        failed_s: Time of its last traceback, or of its end if it has none; in seconds of any clock.
    """

    rank: int
    pid: int
    returncode: int
    stderr_tail: str = ""
    was_stopped: bool = False
    evidence: str = ""
    failed_s: float = 0.0

    @property
    def exit_code(self) -> int:
        """The exit code in a shell: 128 + signal if a signal killed it."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def remoteness(self) -> int:
        """Rank of this exit as a possible root cause, the most likely first; among equal ranks the earlier counts.

        0: failed by itself. 1: reported its own error when the launcher stopped it. 2: reported an error that follows
        from another worker's. 3: was stopped by the launcher.
        """
        if self.was_stopped:
            return 1 if reports_own_error(self.stderr_tail) else 3
        return 2 if _FOLLOWS_ANOTHER.search(last_traceback(self.stderr_tail)) else 0

    def __str__(self) -> str:
        if self.returncode < 0:
            reason = f"; {self.evidence}" if self.evidence else ""
            return (
                f"worker {self.rank} (pid {self.pid}) was killed by {signal_name(-self.returncode)}{reason}"
            )
        return f"worker {self.rank} (pid {self.pid}) failed with exit code {self.returncode}"


def signal_name(number: int) -> str:
    """Returns a name such as SIGKILL, also for signals without a name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(exits: Sequence[WorkerExit]) -> WorkerExit | None:
    """Returns the failure that caused the others, or None if no worker failed.

    It is the earliest of those with the least remoteness.

    Args:
        exits: Exits in the order in which the workers ended.
    """
    failures = [ended for ended in exits if ended.returncode != 0]
    return min(failures, key=lambda ended: (ended.remoteness, ended.failed_s), default=None)


def report(failure: WorkerExit, exits: Sequence[WorkerExit] = ()) -> str:
    """Returns the final message: one line, then the last error in the worker's stderr, if any.

    Args:
        failure: The failure that caused the others.
        exits: Exits of all workers; the message names others that failed.
    """
    last_words = last_traceback(failure.stderr_tail) or _last_lines(failure.stderr_tail)
    return f"{failure}{_others(failure, exits)}\n{last_words}"


def headline(failure: WorkerExit, exits: Sequence[WorkerExit] = ()) -> str:
    """The first line of report() and the last line of the worker's last error, if any."""
    said, *last_words = report(failure, exits).strip().splitlines()
    return f"{said}: {last_words[-1].strip()}" if last_words else said


def _others(failure: WorkerExit, exits: Sequence[WorkerExit]) -> str:
    """The other failed workers, and whether this failure caused theirs."""
    others = [ended for ended in exits if ended is not failure and ended.returncode != 0]
    kinds = ((0, 1), "failed too"), ((2,), "failed because of that")
    found = [
        f"; worker(s) {', '.join(map(str, sorted(ranks)))} {what}"
        for remoteness, what in kinds
        if (ranks := [ended.rank for ended in others if ended.remoteness in remoteness])
    ]
    return "".join(found)


def reports_own_error(stderr_tail: str) -> bool:
    """Whether there is a traceback that another worker's failure did not cause."""
    last_words = last_traceback(stderr_tail)
    return bool(last_words) and not _FOLLOWS_ANOTHER.search(last_words)


def last_traceback(stderr_tail: str) -> str:
    """Returns the end of `stderr_tail` from its last traceback on, with its chained exceptions.

    Empty if there is no traceback.
    """
    lines = stderr_tail.splitlines(keepends=True)
    headers = [index for index, line in enumerate(lines) if _TRACEBACK in line]
    if not headers:
        return ""
    start = headers.pop()
    while headers and _is_chained(lines[headers[-1] : start]):
        start = headers.pop()
    return _with_newline("".join(lines[start:]))


def _is_chained(lines: Sequence[str]) -> bool:
    return any(line.strip() in _CHAIN_LINKS for line in lines)


def _last_lines(text: str) -> str:
    return _with_newline("".join(text.splitlines(keepends=True)[-_LINES_WITHOUT_TRACEBACK:]))


def _with_newline(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"

"""Which worker failed first, and what it said last."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from coarse.cli.output import TRACEBACK_HEADER
from coarse.errors import FOLLOW_UP

_TRACEBACK = TRACEBACK_HEADER.decode()
_CHAIN_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FOLLOWS_ANOTHER = re.compile(
    r"^(?:[\w.]+\.)?WorkerLostError\b"
    r"|\bWorkerLostError: "  # within an error of TensorFlow's
    rf"|{re.escape(FOLLOW_UP)}"
    r"|^(?:[\w.]+\.)?DistNetworkError\b"  # torch's: the store of worker 0 is gone
    r"|^RuntimeError: .*Connection (?:closed|reset) by peer"  # Gloo's: a worker is gone
    r"|: rank \d+ (?:died|has left the group|cannot be reached any more)",  # of the backend "coarse"
    re.MULTILINE,
)
_LINES_WITHOUT_TRACEBACK = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How a worker ended.

    Args:
        rank: Rank of the worker.
        pid: Its process id while it lived.
        returncode: Exit code, or minus the signal that killed it.
        stderr_tail: The last of its stderr; empty if it was not captured.
        was_stopped: Whether the launcher had told it to stop before it ended.
        evidence: What speaks for a reason for which it was killed; "" if nothing does.
        failed_s: When its last error was seen: its traceback, or else its end; in seconds of any clock.
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
        """As a shell reports it: 128 + signal for a death by signal."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def remoteness(self) -> int:
        """How far this end is from being the cause of all; among equals the earlier counts.

        0: failed by itself. 1: reported an error of its own when it was told to stop. 2: reports an error that
        follows from another worker's. 3: was told to stop.
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
    """Returns a name such as SIGKILL, also for signals that Python has no name for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_failure(exits: Sequence[WorkerExit]) -> WorkerExit | None:
    """Returns the failure that the others follow from, or None if no worker failed.

    It is the earliest of those with the least remoteness.

    Args:
        exits: In the order in which the workers ended.
    """
    failures = [ended for ended in exits if ended.returncode != 0]
    return min(failures, key=lambda ended: (ended.remoteness, ended.failed_s), default=None)


def report(failure: WorkerExit, exits: Sequence[WorkerExit] = ()) -> str:
    """Returns what to print last: one line, then the last error of the worker's stderr, if there is any.

    Args:
        failure: The one that the others follow from.
        exits: Of all workers; those that failed too are named.
    """
    last_words = last_traceback(failure.stderr_tail) or _last_lines(failure.stderr_tail)
    return f"{failure}{_others(failure, exits)}\n{last_words}"


def _others(failure: WorkerExit, exits: Sequence[WorkerExit]) -> str:
    """Which other workers failed, and whether because of this failure."""
    others = [ended for ended in exits if ended is not failure and ended.returncode != 0]
    kinds = ((0, 1), "failed too"), ((2,), "failed because of that")
    found = [
        f"; worker(s) {', '.join(map(str, sorted(ranks)))} {what}"
        for remoteness, what in kinds
        if (ranks := [ended.rank for ended in others if ended.remoteness in remoteness])
    ]
    return "".join(found)


def reports_own_error(stderr_tail: str) -> bool:
    """Whether there is a traceback that does not follow from another worker's failure."""
    last_words = last_traceback(stderr_tail)
    return bool(last_words) and not _FOLLOWS_ANOTHER.search(last_words)


def last_traceback(stderr_tail: str) -> str:
    """Returns the end of `stderr_tail` from its last traceback on, with the exceptions it was chained to.

    Empty if there is none.
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

"""The dashboard of `coarse run --dashboard`: a separate process, which ends with the job."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from coarse.cli.workers.processes import die_with_parent

_END_TIMEOUT_S = 5.0

Tell: TypeAlias = Callable[[str, str], None]
"""Takes the kind of an event, as in coarse.dashboard.samples, and its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions:
    """The dashboard's options on the command line.

    Args:
        port: Port on loopback; 0 for a free one.
        record: File for its samples; None for no recording.
    """

    port: int = 0
    record: Path | None = None


def missing_package() -> str:
    """A package that the dashboard needs and that is not installed; "" if none is missing."""
    needed = ("starlette", "uvicorn")
    return next((name for name in needed if importlib.util.find_spec(name) is None), "")


@contextlib.contextmanager
def dashboard(job: str, options: DashboardOptions) -> Iterator[Tell]:
    """Serves a job's dashboard within the context; yields what adds an event to it.

    Neither a terminal's Ctrl-C nor Ctrl-Z reaches the process, because it shows how the job takes them. The calling
    process must be single-threaded, as for coarse.cli.workers.processes.

    Args:
        job: Id of the job.
        options: From the command line.
    """
    record = [] if options.record is None else ["--record", str(options.record)]
    port = ["--port", str(options.port)] if options.port else []
    command = ["dashboard", job, "--launched", *port, *record]
    process = subprocess.Popen(
        [sys.executable, "-m", "coarse", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    try:
        yield partial(_tell, process.stdin.fileno())
    finally:
        process.stdin.close()
        _end(process)


def _tell(fd: int, kind: str, text: str) -> None:
    with contextlib.suppress(OSError):  # it may be gone, or read too slowly
        os.write(fd, line_of(kind, text))


def line_of(kind: str, text: str) -> bytes:
    """An event as a line of JSON that a pipe takes whole or not at all: a text that is too long ends in "...".

    Args:
        kind, text: As for Tell.
    """
    line, kept = _encode(kind, text), text
    while len(line) > select.PIPE_BUF:
        kept = kept[: len(kept) * 9 // 10]
        line = _encode(kind, f"{kept}...")
    return line


def _encode(kind: str, text: str) -> bytes:
    return json.dumps({"kind": kind, "text": text}).encode() + b"\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

"""Starts `coarse run` for the tests, follows its output, and kills it if a test leaves it running."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import coarse

LIMIT_S = 90.0
"""Time limit for everything that is not itself under test."""

COARSE_RUN = (sys.executable, "-m", "coarse", "run")


def environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment without job variables, with this package importable."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COARSE_")}
    inherited.pop("OMP_NUM_THREADS", None)
    return {**inherited, "PYTHONPATH": str(Path(coarse.__file__).parents[1]), **variables}


def coarse_run(
    *arguments: str | Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end and returns exit code, stdout and stderr."""
    return subprocess.run(
        [*COARSE_RUN, *map(str, arguments)],
        env=environment(**(variables or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@contextlib.contextmanager
def spawned(
    *arguments: str | Path,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
    **variables: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts `coarse run` in its own process session, and always ends it."""
    process = subprocess.Popen(
        [*COARSE_RUN, *map(str, arguments)],
        bufsize=0,
        env=environment(**variables),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=LIMIT_S)
        for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
            stream.close()


def read_pidfds(stream: IO[bytes] | None, count: int) -> dict[str, int]:
    """Reads `count` lines that end in "NAME PID" and returns a pidfd for each name."""
    assert stream is not None
    said = [stream.readline().split()[-2:] for _ in range(count)]
    return {name.decode(): os.pidfd_open(int(pid)) for name, pid in said}


def all_end_within(limit_s: float, pidfds: Mapping[str, int]) -> list[str]:
    """Waits for the processes to end; returns the names of those still running after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    return [name for name, pidfd in pidfds.items() if not _ends_before(deadline, pidfd)]


def _ends_before(deadline: float, pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

"""The job behind `coarse profile`: workers that measure links between them and the memory devices."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coarse.cli.workers.failure import last_traceback
from coarse.cli.workers.processes import die_with_parent
from coarse.env import WorkerIdentity, own_process_environment
from coarse.errors import CoarseError
from coarse.process.scratch import Scratch
from coarse.store import DirectoryStore

if TYPE_CHECKING:
    from coarse.profiler.profile import Profile

_MODULE = "coarse.cli.measurement.link_measurement"
_RESULT = "profile.json"
_PROGRESS_KEY = "progress"
_PROGRESS_INTERVAL_S = 0.2
_ERROR_LINES = 5
_REFUSAL = re.compile(r"^coarse run: error: (.*) \(see `coarse run --help`\)$", re.MULTILINE)

Progress = Callable[[float], None]


class MeasurementError(CoarseError):
    """The measuring workers failed; the message has the last output of the first one."""


class RefusedError(CoarseError):
    """The requested memory devices are not possible on this machine; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementJob:
    """The measuring job to start.

    Args:
        num_workers: Workers, at least 2.
        flags: Flags of `coarse run`, for the session.
        budget_s: Time limit for measuring, in seconds.
    """

    num_workers: int
    flags: tuple[str, ...]
    budget_s: float

    def run(self, progress: Progress) -> Profile:
        """Starts the workers by `coarse run` and returns their measurements.

        Args:
            progress: Called periodically with the completed fraction, from 0 to 1.

        Raises:
            RefusedError: If `coarse run` refuses to start the job.
            MeasurementError: If a worker fails. No process remains.
            ProfileError: If the result cannot be read.
        """
        from coarse.profiler.profile import Profile

        with Scratch("profile") as folder:
            self._run_workers(folder, progress)
            return Profile.load(folder / _RESULT)

    def _run_workers(self, folder: Path, progress: Progress) -> None:
        command = [sys.executable, "-m", "coarse", "run", "-q", "-n", str(self.num_workers), *self.flags]
        errors = folder / "stderr"
        with errors.open("wb") as stderr:
            launcher = subprocess.Popen(
                [*command, "-m", _MODULE, str(folder), repr(self.budget_s)],
                env={**own_process_environment(), "OMP_NUM_THREADS": "1", "COARSE_PROFILE": "off"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        store = DirectoryStore(folder)
        try:
            while _is_running(launcher):
                progress(_progress_of(store))
        except BaseException:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait()
            raise
        if launcher.returncode != 0:
            words = errors.read_text(errors="replace")
            if refusal := _REFUSAL.search(words):
                raise RefusedError(refusal[1])
            raise MeasurementError(_last_words(words))


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_PROGRESS_INTERVAL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _progress_of(store: DirectoryStore) -> float:
    try:
        return float(store.get(_PROGRESS_KEY, timeout_s=0.0))
    except TimeoutError:
        return 0.0


def _last_words(stderr: str) -> str:
    lines = [line for line in (last_traceback(stderr) or stderr).splitlines() if line.strip()]
    return lines[-1] if last_traceback(stderr) else " | ".join(lines[-_ERROR_LINES:])


def work(folder: str, budget_s: float) -> None:
    """The work of each worker: joins and measures in its turn; the first worker writes the result."""
    from coarse.session import Session
    from coarse.tuning.measure import MeasurePlan, measure_profile

    identity = WorkerIdentity.from_environment()
    store = DirectoryStore(folder)
    told_s = 0.0

    def tell(done: float) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _PROGRESS_INTERVAL_S:
            told_s = time.monotonic()
            store.set(_PROGRESS_KEY, repr(done).encode())

    with Session.join(identity=identity, store=store) as session:
        profile = measure_profile(session, MeasurePlan(budget_s=budget_s), progress=tell)
        if identity.rank == 0:
            profile.save(Path(folder) / _RESULT)


if __name__ == "__main__":
    work(sys.argv[1], float(sys.argv[2]))

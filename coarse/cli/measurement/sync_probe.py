"""A complete two-worker all-reduce, which tests whether COARSE works on this machine and measures its latency."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from coarse.cli.workers.processes import die_with_parent
from coarse.env import WorkerIdentity, own_process_environment
from coarse.process.scratch import Scratch
from coarse.store import DirectoryStore

SCRIPT_MODULE = "coarse.cli.measurement.sync_probe"
NUM_WORKERS = 2
NUM_ELEMENTS = 1024
NUM_REPEATS = 200
_NUM_WARM_UPS = 20
_RESULT_KEY = "doctor/latency"
_ERROR_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncLatency:
    """Time of one verified all-reduce of 4 KiB, measured by worker 0."""

    p50_us: float
    p99_us: float


class SyncProbeError(Exception):
    """The two workers did not finish; the message has the last output of the first that failed."""


def probe_sync(*, limit_s: float = 60.0) -> SyncLatency:
    """Starts two workers by `coarse run`, lets them all-reduce, and returns the latency.

    Raises:
        SyncProbeError: If a worker fails, a sum is wrong, or `limit_s` seconds pass. No process remains.
    """
    with Scratch("doctor") as directory:
        _run_job(os.fspath(directory), limit_s)
        try:
            result = DirectoryStore(directory).get(_RESULT_KEY, timeout_s=0.0)
        except TimeoutError:
            raise SyncProbeError("the workers ended without a result") from None
    return SyncLatency(**json.loads(result))


def _run_job(directory: str, limit_s: float) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-m", "coarse", "run", "-q", "-n", str(NUM_WORKERS), "-m", SCRIPT_MODULE, directory],
        env={**own_process_environment(), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
    )
    try:
        _, stderr = launcher.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        launcher.send_signal(signal.SIGTERM)
        raise SyncProbeError(
            f"no result within {limit_s:.0f} s: {_last_words(launcher.communicate()[1])}"
        ) from None
    except BaseException:
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate()
        raise
    if launcher.returncode != 0:
        raise SyncProbeError(_last_words(stderr))


def _last_words(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return " | ".join(lines[-1:] if any("Traceback" in line for line in lines) else lines[-_ERROR_LINES:])


def work(directory: str) -> None:
    """The work of each of the two workers: joins, verifies one sum, measures the next ones.

    Raises:
        ArithmeticError: If a sum is wrong.
    """
    import numpy as np

    from coarse.session import Session

    identity = WorkerIdentity.from_environment()
    store = DirectoryStore(directory)
    values = np.empty(NUM_ELEMENTS, dtype=np.float32)
    with Session.join(identity=identity, store=store) as session:
        latencies_us = []
        for _ in range(_NUM_WARM_UPS + NUM_REPEATS):
            values.fill(2.0**identity.rank)
            start_ns = time.perf_counter_ns()
            session.all_reduce(values)
            latencies_us.append((time.perf_counter_ns() - start_ns) / 1e3)
            if not (values == 2.0**identity.world_size - 1).all():
                raise ArithmeticError(
                    f"worker {identity.rank}: the sum of {identity.world_size} is {values[0]}"
                )
        if identity.rank == 0:
            p50_us, p99_us = np.percentile(latencies_us[_NUM_WARM_UPS:], (50, 99))
            store.set(_RESULT_KEY, json.dumps({"p50_us": p50_us, "p99_us": p99_us}).encode())


if __name__ == "__main__":
    work(sys.argv[1])

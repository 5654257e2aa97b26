"""Memory of a system: proportional set size, summed over its processes and sampled while they work."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import psutil

from coarse.machine.host import read_memory
from coarse.proxy.memory.host import within_cgroup

_SAMPLE_INTERVAL_S = 0.02


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional set size of all `pids` together: a page shared by n processes counts 1/n in each of them.

    A process that has ended counts nothing.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += _pss_of(Path(f"/proc/{pid}/smaps_rollup").read_text())
    return total


def available_bytes() -> int:
    """Memory that can be had without swapping, and that the control group allows."""
    return within_cgroup(read_memory().available_bytes)


class PeakPss:
    """Samples the PSS of a changing set of processes while the context lasts, in a thread of its own.

    Reading it walks page tables and stops the process's page faults meanwhile: never do it while something is
    timed.

    Args:
        processes: Returns the processes to count; called for each sample.
    """

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        self.peak_bytes = 0
        self._processes = processes
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_finished, daemon=True)

    def __enter__(self) -> PeakPss:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        self._thread.join()

    def _sample_until_finished(self) -> None:
        while True:
            self._sample()
            if self._finished.wait(_SAMPLE_INTERVAL_S):
                return

    def _sample(self) -> None:
        pids = [process.pid for process in self._processes() if process.pid != os.getpid()]
        self.peak_bytes = max(self.peak_bytes, pss_bytes(pids))


def _pss_of(smaps_rollup: str) -> int:
    """Bytes of the `Pss:` line."""
    for line in smaps_rollup.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0

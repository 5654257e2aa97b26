"""Memory of a system, sampled while it works: what the kernel gave out, or proportional set sizes of processes."""

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


class PeakMemory:
    """Samples the memory that the kernel has given out while the context lasts, in a thread of its own.

    That is anonymous and shared memory of the whole machine, touched or not: nothing else should run. Unlike a
    proportional set size it leaves out nothing that a control group would count, but the page cache.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_finished, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        self._thread.join()

    def _sample_until_finished(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, given_out_bytes())
            if self._finished.wait(_SAMPLE_INTERVAL_S):
                return


def given_out_bytes() -> int:
    """Anonymous and shared memory of all processes of the machine."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("AnonPages", "Shmem"))


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

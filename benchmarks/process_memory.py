"""How much memory a whole job takes at its peak, shared pages counted once."""

from __future__ import annotations

import os
import threading
from types import TracebackType

import psutil


class PeakMemory:
    """Samples the proportional set size (PSS) of a job's processes while its block runs.

    A job is the process `root`, all its descendants, and whatever runs in the session that `root` leads; a
    process once seen stays in the job when its parent dies. A page that several processes share counts in
    equal parts, so the sum over a job is what the machine really holds for it.

    Raises:
        RuntimeError: When the block ends, if no process could be measured.
    """

    def __init__(self, root: int, *, interval_s: float = 0.25) -> None:
        self._root = root
        self._interval_s = interval_s
        self._members: set[psutil.Process] = set()
        self._peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_done, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if self._peak_bytes == 0 and error is None:
            raise RuntimeError(f"the memory of process {self._root} cannot be read from /proc")

    @property
    def peak_mib(self) -> float:
        """The largest sum so far, in MiB."""
        return self._peak_bytes / 2**20

    def _sample_until_done(self) -> None:
        while True:
            self._peak_bytes = max(self._peak_bytes, sum(map(_pss_bytes, self._find_members())))
            if self._done.wait(self._interval_s):
                return

    def _find_members(self) -> set[psutil.Process]:
        others = set(psutil.process_iter())
        members = {process for process in others if process.pid == self._root or process in self._members}
        members |= {process for process in others if _session_of(process) == self._root}
        others -= members
        while new := {process for process in others if _parent_of(process) in {m.pid for m in members}}:
            members |= new
            others -= new
        self._members = members
        return members


def _session_of(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1


def _parent_of(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.Error:
        return -1


def _pss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.Error, OSError):
        return 0  # it has ended, or is not ours

"""Memory of a whole job as the kernel counts it: by a memory control group, or by what the machine has given out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from coarse.bench.control_group import ControlGroup, NoControlGroupError
from coarse.machine.host import parse_fields, parse_kib, read_memory
from coarse.wire.host_memory import within_cgroup

_SAMPLE_INTERVAL_S = 0.02


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
        self._before_bytes = 0
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_finished, daemon=True)

    @property
    def grown_bytes(self) -> int:
        """The peak less what was given out when the context began."""
        return self.peak_bytes - self._before_bytes

    def __enter__(self) -> PeakMemory:
        self._before_bytes = given_out_bytes()
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
    fields = parse_fields(Path("/proc/meminfo").read_text())
    return sum(parse_kib(fields[name]) for name in ("AnonPages", "Shmem"))


class JobMemory:
    """The peak of one job's memory from its start: by a control group where one can be made, else by PeakMemory.

    Context manager, of which each is used once.
    """

    def __init__(self) -> None:
        self._machine = PeakMemory()
        self._group: ControlGroup | None = None
        self._last_bytes = 0
        with contextlib.suppress(NoControlGroupError):
            self._group = ControlGroup(may_move=False)

    @property
    def group(self) -> ControlGroup | None:
        """Where the job is to be started; None where the whole machine is watched."""
        return self._group

    @property
    def peak_bytes(self) -> int:
        """Of the whole job so far; at last until the context ended."""
        if self._last_bytes:
            return self._last_bytes
        return self._machine.grown_bytes if self._group is None else self._group.peak_bytes

    @property
    def how(self) -> str:
        """How it is counted, in words."""
        if self._group is not None:
            return "peak of a memory control group of the whole job, its start included"
        return (
            "growth of anonymous and shared memory of the whole machine at its peak, the job's start included"
        )

    def command(self, command: Iterable[str]) -> tuple[str, ...]:
        """What starts a command so that it is counted."""
        return tuple(command) if self._group is None else self._group.command(command)

    def __enter__(self) -> JobMemory:
        self._machine.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._machine.__exit__(kind, error, trace)
        self._last_bytes = self.peak_bytes
        if self._group is not None:
            self._group.close()

"""Memory of a whole job as counted by the kernel: in a memory control group, or as allocated on the machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from coarse.bench.harness.commands import BenchError
from coarse.bench.harness.control_group import ControlGroup, NoControlGroupError
from coarse.machine.host import parse_fields, parse_kib, read_memory
from coarse.wire.host_memory import within_cgroup

_SAMPLE_INTERVAL_S = 0.02


def available_bytes() -> int:
    """Memory that is available without swapping and within the control group's limit."""
    return within_cgroup(read_memory().available_bytes)


def require_memory(needed_bytes: int, who_needs: str, advice: str) -> None:
    """Refuses work that cannot fit.

    Args:
        needed_bytes: Needed memory.
        who_needs: The beginning of the message, such as "2 workers need at least".
        advice: Its end.

    Raises:
        BenchError: If less is available.
    """
    available = available_bytes()
    if needed_bytes > available:
        raise BenchError(
            f"{who_needs} {needed_bytes / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available. {advice}"
        )


class PeakMemory:
    """Samples the kernel's allocated memory within the context, in a separate thread.

    This is anonymous and shared memory of the whole machine, touched or not, so nothing else should run. In contrast
    to a proportional set size, it includes everything that a control group would count, except the page cache.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._before_bytes = 0
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_finished, daemon=True)

    @property
    def grown_bytes(self) -> int:
        """The peak minus the allocated memory at the beginning of the context."""
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
    """The peak of one job's memory from its start: by a control group if possible, otherwise by PeakMemory.

    Context manager; use each instance once.
    """

    def __init__(self) -> None:
        self._machine = PeakMemory()
        self._group: ControlGroup | None = None
        self._last_bytes = 0
        with contextlib.suppress(NoControlGroupError):
            self._group = ControlGroup(may_move=False)

    @property
    def group(self) -> ControlGroup | None:
        """The group in which the job must be started; None if the whole machine is measured."""
        return self._group

    @property
    def peak_bytes(self) -> int:
        """Peak of the whole job so far; after the context, of the whole context."""
        if self._last_bytes:
            return self._last_bytes
        return self._machine.grown_bytes if self._group is None else self._group.peak_bytes

    @property
    def how(self) -> str:
        """The method of counting, in words."""
        if self._group is not None:
            return "peak of a memory control group of the whole job, its start included"
        return (
            "growth of anonymous and shared memory of the whole machine at its peak, the job's start included"
        )

    def command(self, command: Iterable[str]) -> tuple[str, ...]:
        """Returns the command line that runs a command so that its memory is counted."""
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

"""A limit on the memory of a job: a control group of its own, in which the kernel kills what goes beyond."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Controller:
    """The files by which a version of control groups limits memory.

    Args:
        parent: The group of this process.
        limit: Bytes that a group may use.
        swap_limit: Bytes of swap that it may use.
        counts_swap_too: Whether that is of memory and swap together.
        events: Has a line `oom_kill N`.
        peak: The most that a group has used.
    """

    parent: Path
    limit: str
    swap_limit: str
    counts_swap_too: bool
    events: str
    peak: str


class MemoryLimit:
    """A control group for a job. Context manager: at its end whatever still runs in the group is killed.

    Args:
        num_bytes: Memory that all processes of the job may have together, shared memory and page cache included.

    Raises:
        PermissionError: If this process may not make a group with a limit; says what to do.
    """

    def __init__(self, num_bytes: int) -> None:
        self._controller = _controller()
        self._group = self._controller.parent / f"coarse-{os.getpid()}-{time.monotonic_ns()}"
        try:
            self._group.mkdir()
            self._set_limit(num_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._group.rmdir()
            raise PermissionError(
                f"no memory limit can be set: {error}. It takes a control group of your own: run under systemd-run "
                "--scope -p Delegate=yes (with --user if you are not root)"
            ) from error

    def __enter__(self) -> MemoryLimit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while pids := self._pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {pids} of {self._group} do not end")
            time.sleep(0.01)
        self._group.rmdir()

    def command(self, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` in the group."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._group / "cgroup.procs"), *argv]

    @property
    def num_killed(self) -> int:
        """How many processes the kernel has killed here because memory ran out."""
        found = re.search(
            r"^oom_kill (\d+)$", (self._group / self._controller.events).read_text(), re.MULTILINE
        )
        return int(found.group(1)) if found else 0

    @property
    def peak_bytes(self) -> int:
        """The most memory that the group had at any time, cached pages of files included."""
        return int((self._group / self._controller.peak).read_text())

    def _set_limit(self, num_bytes: int) -> None:
        self._write(self._controller.limit, num_bytes)
        with contextlib.suppress(FileNotFoundError):  # where swap is not accounted
            self._write(self._controller.swap_limit, num_bytes if self._controller.counts_swap_too else 0)

    def _write(self, name: str, num_bytes: int) -> None:
        (self._group / name).write_text(str(num_bytes))

    def _pids(self) -> list[int]:
        return [int(pid) for pid in (self._group / "cgroup.procs").read_text().split()]


@functools.cache  # of version 2, this process is in another group afterwards
def _controller(root: Path = Path("/")) -> _Controller:
    """Of whichever version of control groups has the memory of this process."""
    groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    of_memory = [path for _, names, path in groups if "memory" in names.split(",")]
    if of_memory:
        return _Controller(
            parent=_existing(root / "sys/fs/cgroup/memory", of_memory[0]),
            limit="memory.limit_in_bytes",
            swap_limit="memory.memsw.limit_in_bytes",
            counts_swap_too=True,
            events="memory.oom_control",
            peak="memory.max_usage_in_bytes",
        )
    path = next((path for _, names, path in groups if not names), "/")
    parent = _existing(root / "sys/fs/cgroup", path)
    with contextlib.suppress(OSError):  # then no limit can be set, which is told there
        _pass_memory_on(parent)
    return _Controller(
        parent=parent,
        limit="memory.max",
        swap_limit="memory.swap.max",
        counts_swap_too=False,
        events="memory.events",
        peak="memory.peak",
    )


def _pass_memory_on(parent: Path) -> None:
    """Has groups below one of version 2 have limits.

    But for the root no group may have both processes and such groups: its processes move to one below.
    """
    control = parent / "cgroup.subtree_control"
    try:
        control.write_text("+memory")
        return
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    leaf = parent / f"coarse-{os.getpid()}"
    leaf.mkdir()
    for pid in (parent / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (leaf / "cgroup.procs").write_text(pid)
    control.write_text("+memory")


def _existing(mount: Path, path: str) -> Path:
    """The group as this process sees it: in a container its own may be what is mounted."""
    own = mount / path.lstrip("/")
    return own if own.is_dir() else mount

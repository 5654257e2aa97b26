"""Memory control groups: the kernel's memory count of a whole job, and the limit at which it kills processes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from coarse.errors import CoarseError
from coarse.machine.host import parse_cgroups

_ROOT = Path("/")
_PATIENCE_S = 10.0
_POLL_INTERVAL_S = 0.01
_JOIN = 'echo $$ > "$0" && exec "$@"'


class NoControlGroupError(CoarseError, PermissionError):
    """This process may not create a memory control group; the message suggests an action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Controller:
    """The files in which a version of control groups counts and limits memory.

    Args:
        limit: Bytes that a group may use.
        swap_limit: Bytes of swap that it may use.
        counts_swap_too: Whether `swap_limit` applies to memory and swap together.
        events: Has a line `oom_kill N`.
        peak: The group's peak use.
    """

    limit: str
    swap_limit: str
    counts_swap_too: bool
    events: str
    peak: str


_VERSION_1 = _Controller(
    limit="memory.limit_in_bytes",
    swap_limit="memory.memsw.limit_in_bytes",
    counts_swap_too=True,
    events="memory.oom_control",
    peak="memory.max_usage_in_bytes",
)
_VERSION_2 = _Controller(
    limit="memory.max",
    swap_limit="memory.swap.max",
    counts_swap_too=False,
    events="memory.events",
    peak="memory.peak",
)


class ControlGroup:
    """A memory control group for a job. Context manager: at its end, all processes in the group are killed.

    The kernel counts the same memory as for a container's limit: private memory, allocated shared memory (touched or
    not), its own memory for these processes, and the page cache of files that they are the first to read.

    Args:
        limit_bytes: Limit for all processes of the job together, without swap; 0 for no limit.
        may_move: With version 2, whether other processes of this process's group may be moved to a new group below
            it, if no group could be created otherwise.

    Raises:
        NoControlGroupError: If this process may not create a group; suggests an action.
    """

    def __init__(self, limit_bytes: int = 0, *, may_move: bool = True) -> None:
        self._group, self._controller = _make_group(may_move=may_move)
        try:
            if limit_bytes:
                self._set_limit(limit_bytes)
        except OSError as error:
            self._group.rmdir()
            raise _no_group(error) from error

    def __enter__(self) -> ControlGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills all processes in the group, and removes it. Idempotent.

        Raises:
            TimeoutError: If processes do not end.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while self._group.exists():
            for pid in self._pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # fails while the kernel still counts memory
                self._group.rmdir()
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {self._pids()} of {self._group} do not end")
            time.sleep(_POLL_INTERVAL_S)

    def command(self, argv: Iterable[str]) -> tuple[str, ...]:
        """Returns a command line that runs `argv` in the group."""
        return ("/bin/sh", "-c", _JOIN, str(self._group / "cgroup.procs"), *argv)

    @property
    def num_killed(self) -> int:
        """Number of processes in the group that the kernel killed because memory ran out."""
        found = re.search(
            r"^oom_kill (\d+)$", (self._group / self._controller.events).read_text(), re.MULTILINE
        )
        return int(found.group(1)) if found else 0

    @property
    def peak_bytes(self) -> int:
        """The group's peak memory."""
        return int((self._group / self._controller.peak).read_text())

    def _set_limit(self, num_bytes: int) -> None:
        self._write(self._controller.limit, num_bytes)
        with contextlib.suppress(FileNotFoundError):  # if swap is not accounted
            self._write(self._controller.swap_limit, num_bytes if self._controller.counts_swap_too else 0)

    def _write(self, name: str, num_bytes: int) -> None:
        (self._group / name).write_text(str(num_bytes))

    def _pids(self) -> list[int]:
        return [int(pid) for pid in (self._group / "cgroup.procs").read_text().split()]


def _make_group(*, may_move: bool) -> tuple[Path, _Controller]:
    """Creates a group below this process's own or, if not permitted there, below one of its ancestors."""
    name = f"coarse-{os.getpid()}-{time.monotonic_ns()}"
    error: OSError | None = None
    for parent, controller in _parents(_ROOT, may_move=may_move):
        group = parent / name
        try:
            group.mkdir()
        except OSError as refusal:
            error = error or refusal
            continue
        if (group / controller.peak).exists():
            return group, controller
        group.rmdir()
    raise _no_group(error)


def _no_group(error: OSError | None) -> NoControlGroupError:
    return NoControlGroupError(
        "memory cannot be counted or limited as the kernel does it: "
        f"{error or 'no control group here counts memory'}. It takes a control group of your own: run as root, or "
        "under systemd-run --scope -p Delegate=yes (with --user if you are not root); in a container, with "
        "--privileged and --cgroupns=private"
    )


def _parents(root: Path, *, may_move: bool) -> Iterator[tuple[Path, _Controller]]:
    """Possible parents of a new group, in the version of control groups that accounts this process's memory."""
    paths = parse_cgroups((root / "proc/self/cgroup").read_text())
    if "memory" in paths:
        yield from ((each, _VERSION_1) for each in _upwards(root / "sys/fs/cgroup/memory", paths["memory"]))
        return
    folders = _upwards(root / "sys/fs/cgroup", paths.get("", "/"))
    yield from ((each, _VERSION_2) for each in folders)
    if may_move:
        with contextlib.suppress(OSError):  # then no group can be created, which is reported later
            _pass_memory_on(folders[0])
        yield folders[0], _VERSION_2


def _upwards(mount: Path, path: str) -> list[Path]:
    """A group's visible path and its ancestors; in a container, the process's own group may be the mounted one."""
    own = mount / path.strip("/")
    folders = [own, *own.parents]
    return [each for each in folders[: folders.index(mount) + 1] if each.is_dir()] or [mount]


def _pass_memory_on(parent: Path) -> None:
    """Enables memory limits for groups below a group of version 2.

    Except for the root, no group may have both processes and such child groups. So its processes move to a child.
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

"""Python processes that have modules imported when they begin: forks of a template, because imports take long.

They run a script as `python` does, with arguments, environment and descriptors of their own, and end as its processes
do. For tests that are not about imports: PyTorch takes seconds, and the modules of a memory device take longer than
many tests of one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_OF_ONE_JOB = (
    "COARSE_",
    "LOCAL_",
    "MASTER_",
    "PYTEST_",
    "RANK",
    "STAND_IN_",
    "TMPDIR",
    "TORCHELASTIC_",
    "WORLD_",
)
"""Variables, by their beginnings, that nothing reads while PyTorch is imported. XDG_CACHE_HOME is another one."""

_MOST_BYTES = 1 << 17
_MOST_DESCRIPTORS = 250
_BEYOND_THOSE_OF_SCRIPTS = 700
_ROOM_BYTES = 1 << 14
"""For the environment of a fork in /proc, beside that of the template."""

TORCH = ("torch._dynamo", "torch.distributed")
"""PyTorch, and the compiler, which its optimizers import."""

DEVICE = ("coarse.cli.main", "coarse.proxy.device_process", "coarse.startup.node_reconnection")
"""What `coarse device` imports."""


class ForkedProcess:
    """A fork, with what tests use of subprocess.Popen.

    Args:
        name: For messages.
        pid: Its process id.
        pidfd: Of the process.
        status_fd: Tells how it ended, after its end. This object takes ownership of both.
    """

    def __init__(self, name: str, pid: int, pidfd: int, status_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._name = name
        self._pidfd = pidfd
        self._status_fd = status_fd
        self._ending = threading.Lock()

    def fileno(self) -> int:
        """A descriptor that can be read when it has ended, and before wait()."""
        return self._pidfd

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or minus the signal that killed it.

        Raises:
            subprocess.TimeoutExpired: If it does not end in time.
        """
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status_fd, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(self._name, timeout or 0.0)
            with self._ending:
                if self.returncode is None:  # no other thread was first
                    self.returncode = os.waitstatus_to_exitcode(int(os.read(self._status_fd, 32)))
                    os.close(self._status_fd)
                    os.close(self._pidfd)
        return self.returncode

    def kill(self) -> None:
        """Kills it; does nothing if it has ended."""
        with self._ending:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def start(
    script: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: int,
    errors: int | None = None,
    pass_fds: Sequence[int] = (),
    imports: tuple[str, ...] = TORCH,
    is_own_group: bool = False,
) -> ForkedProcess:
    """Starts a script. Forks of this process may do so at the same time, from a template that it has prepared.

    Args:
        script: The script.
        arguments: Its arguments.
        environment: Its whole environment.
        output, errors: Descriptors for stdout and stderr; without `errors`, `output` is for both.
        pass_fds: Descriptors that it has under the same numbers.
        imports: The modules that it begins with.
        is_own_group: Whether it leads a process group.
    """
    request = {
        "script": str(script),
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": os.getcwd(),
        "numbers": [0, 1, 2, *pass_fds],
        "is_own_group": is_own_group,
    }
    with open(os.devnull) as nothing:
        descriptors = [nothing.fileno(), output, output if errors is None else errors, *pass_fds]
        return _template(imports, environment_of_imports(environment)).fork(request, descriptors)


def prepare(environment: Mapping[str, str], imports: tuple[str, ...]) -> None:
    """Starts the template for start() with these arguments."""
    _template(imports, environment_of_imports(environment))


def environment_of_imports(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that a template has from the first process that needs it."""
    return tuple(
        sorted(
            (name, value)
            for name, value in environment.items()
            if not name.startswith(_OF_ONE_JOB) and name != "XDG_CACHE_HOME"
        )
    )


class _Template:
    """The process that is forked; it ends with this one."""

    def __init__(self, imports: Sequence[str], environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kind = ("coarse", "device") if imports == DEVICE else ()  # as a device's own command line has it
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *kind, *imports, str(theirs.fileno())],
                env={**environment, "ROOM": "-" * _ROOM_BYTES},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._close)

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> ForkedProcess:
        # Each request has an answer channel of its own: forks of this process may make requests, too.
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._channel, [json.dumps(request).encode()], [*descriptors, theirs.fileno()])
        pid, (pidfd,), _, _ = socket.recv_fds(answers, 32, 1)
        return ForkedProcess(request["script"], int(pid), pidfd, answers.detach())

    def _close(self) -> None:
        self._channel.shutdown(socket.SHUT_RDWR)  # forks of this process may have it too
        self._channel.close()
        self._process.wait()


@functools.cache
def _template(imports: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> _Template:
    return _Template(imports, dict(environment))


# ---- in the template ----


def _import_all(names: Sequence[str]) -> None:
    """Garbage collection leaves all of it out from then on."""
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the threads; set OMP_NUM_THREADS=1"


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks at each request, until nobody can make one; returns in the forks alone, with request and descriptors."""
    running: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                poll.unregister(ready)
                _tell_end(ready, *running.pop(ready))
                continue
            request, descriptors, _, _ = socket.recv_fds(channel, _MOST_BYTES, _MOST_DESCRIPTORS)
            if not request:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                channel.detach()
                return json.loads(request), descriptors[:-1]
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, (answers := descriptors.pop())
            with socket.socket(fileno=os.dup(answers)) as channel_of_one, contextlib.suppress(OSError):
                socket.send_fds(channel_of_one, [str(pid).encode()], [pidfd])  # unless nobody waits
            poll.register(pidfd, select.POLLIN)
            for descriptor in descriptors:
                os.close(descriptor)


def _tell_end(pidfd: int, pid: int, status_fd: int) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    with contextlib.suppress(BrokenPipeError):  # nobody waits
        os.write(status_fd, str(status).encode())
    os.close(status_fd)


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> types.ModuleType:
    """Makes this fork a process that is about to run the script; returns the module for it."""
    kept = [fcntl.fcntl(each, fcntl.F_DUPFD, _BEYOND_THOSE_OF_SCRIPTS) for each in descriptors]
    os.closerange(3, _BEYOND_THOSE_OF_SCRIPTS)
    for descriptor, number in zip(kept, request["numbers"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["is_own_group"]:
        os.setpgrp()
    os.environ.clear()
    os.environ.update(request["environment"])
    _show_environment()
    tempfile.tempdir = None  # TMPDIR may be another one
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = os.path.dirname(request["script"])
    main = types.ModuleType("__main__")
    main.__file__ = request["script"]
    sys.modules["__main__"] = main
    return main


def _show_environment() -> None:
    """Has /proc/PID/environ show this process's environment, as far as there is room, and not the template's."""
    first, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    lines = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    ctypes.memmove(first, lines.ljust(end - first, b"\0"), end - first)  # what setenv() has copied


if __name__ == "__main__":
    *_names, _channel = sys.argv[1:]
    _import_all([name for name in _names if name not in ("coarse", "device")])
    # The script runs here, where an error that nobody handles ends the interpreter as it would end the script's own.
    _main = _become(*_serve(socket.socket(fileno=int(_channel))))
    exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), _main.__dict__)

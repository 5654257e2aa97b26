"""Python processes that have PyTorch imported when they begin: forks of a template, because the import takes seconds.

They run a script as `python` does, with arguments, environment and descriptors of their own, and end as its processes
do. For tests that are not about what a process imports.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
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
_MOST_DESCRIPTORS = 16
_BEYOND_THOSE_OF_SCRIPTS = 900


class ForkedProcess:
    """A fork, with what tests use of subprocess.Popen.

    Args:
        name: For messages.
        pidfd: Of the process.
        status_fd: Tells how it ended, after its end. This object takes ownership of both.
    """

    def __init__(self, name: str, pidfd: int, status_fd: int) -> None:
        self._name = name
        self._pidfd = pidfd
        self._status_fd = status_fd
        self.returncode: int | None = None

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
            self.returncode = os.waitstatus_to_exitcode(int(os.read(self._status_fd, 32)))
            os.close(self._status_fd)
            os.close(self._pidfd)
        return self.returncode

    def kill(self) -> None:
        """Kills it; does nothing if it has ended."""
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
) -> ForkedProcess:
    """Starts a script.

    Args:
        script: The script.
        arguments: Its arguments.
        environment: Its whole environment.
        output, errors: Descriptors for stdout and stderr; without `errors`, `output` is for both.
        pass_fds: Descriptors that it has under the same numbers.
    """
    request = {
        "script": str(script),
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": os.getcwd(),
        "numbers": [0, 1, 2, *pass_fds],
    }
    shared = {
        name: value
        for name, value in environment.items()
        if not name.startswith(_OF_ONE_JOB) and name != "XDG_CACHE_HOME"
    }
    with open(os.devnull) as nothing:
        descriptors = [nothing.fileno(), output, output if errors is None else errors, *pass_fds]
        return _template(tuple(sorted(shared.items()))).fork(request, descriptors)


class _Template:
    """The process that is forked; it ends with this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._close)

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> ForkedProcess:
        status_fd, theirs = os.pipe()
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], [*descriptors, theirs])
        finally:
            os.close(theirs)
        _, (pidfd,), _, _ = socket.recv_fds(self._channel, 1, 1)
        return ForkedProcess(request["script"], pidfd, status_fd)

    def _close(self) -> None:
        self._channel.shutdown(socket.SHUT_RDWR)  # forks of this process may have it too
        self._channel.close()
        self._process.wait()


@functools.cache
def _template(environment: tuple[tuple[str, str], ...]) -> _Template:
    return _Template(dict(environment))


# ---- in the template ----


def _import_torch() -> None:
    """Also the compiler, which torch's optimizers import; garbage collection leaves all of it out from then on."""
    gc.disable()
    import torch._dynamo
    import torch.distributed  # noqa: F401

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
            socket.send_fds(channel, [b"!"], [pidfd])
            running[pidfd] = pid, descriptors.pop()
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
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # TMPDIR may be another one
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = os.path.dirname(request["script"])
    main = types.ModuleType("__main__")
    main.__file__ = request["script"]
    sys.modules["__main__"] = main
    return main


if __name__ == "__main__":
    _import_torch()
    # The script runs here, where an error that nobody handles ends the interpreter as it would end the script's own.
    _main = _become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
    exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), _main.__dict__)

"""The supervisor's handle of the preloader, which is started with the job and forks its workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from coarse.cli.workers.preloader.process import CHANNEL, MOST_BYTES, PYTHON_PATH
from coarse.cli.workers.processes import die_with_parent, signal_all
from coarse.errors import CoarseError

_ANSWER_LIMIT_S = 10.0
"""Longest time of a fork, which takes milliseconds."""

_OF_ONE_WORKER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
)
"""Variables that differ between workers or attempts: no import may depend on them."""


class PreloaderLostError(CoarseError):
    """The preloader has ended, or does not answer."""


@dataclass(slots=True)
class ForkedWorker:
    """A worker that was forked, a child of this process, with what is used of subprocess.Popen.

    Args:
        pid: Its process id.
        stdout, stderr: Read ends of its output; None if it writes to this process's own.
    """

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    returncode: int | Any = None  # as subprocess.Popen's


class Preloader:
    """The preloader of a job. The calling process must be single-threaded and a subreaper, and reaps it.

    Args:
        command: Of each worker: Python, with a script or a module.
        environment: Of the first worker.
        modules: Modules to import.
        pass_fds: Descriptors that it and all workers inherit.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        modules: Sequence[str],
        *,
        pass_fds: Sequence[int],
    ) -> None:
        self.is_ready = False
        self.failure = ""
        """Why it cannot be used; "" if nothing is wrong or it has ended without a word."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in environment.items() if name not in _OF_ONE_WORKER}
        with theirs:
            self.process = subprocess.Popen(
                command,
                bufsize=0,
                env=_with_sitecustomize(environment, theirs.fileno()),
                pass_fds=(theirs.fileno(), *pass_fds),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
            )
        begin = {"environment": environment, "modules": list(modules), "supervisor": os.getpid()}
        self._send(begin, [])

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def fileno(self) -> int:
        """A descriptor that can be read when it is ready, has failed or has ended."""
        return self._channel.fileno()

    def take_answer(self) -> None:
        """Learns whether it is ready or why it has failed, if it has said so. Does not block."""
        try:
            self._channel.setblocking(False)
            data = self._channel.recv(MOST_BYTES)
        except OSError:  # it says nothing any more, or not yet
            return
        answer: dict[str, Any] = json.loads(data or b"{}")
        self.is_ready = self.is_ready or "ready" in answer
        self.failure = answer.get("failed", self.failure)

    def fork(self, environment: Mapping[str, str], *, reads_stdin: bool, has_pipes: bool) -> ForkedWorker:
        """Forks a worker that becomes a child of this process; takes milliseconds.

        Args:
            environment: Its whole environment.
            reads_stdin: Whether it has this process's stdin.
            has_pipes: Whether its output goes to pipes; otherwise to this process's stdout and stderr.

        Raises:
            PreloaderLostError: If it cannot be used any more.
            OSError: If the system refuses a fork.
        """
        with ExitStack() as theirs, ExitStack() as ours:
            nothing = theirs.enter_context(open(os.devnull, "rb"))
            given = [0 if reads_stdin else nothing.fileno(), 1, 2]
            streams: list[IO[bytes] | None] = [None, None]
            if has_pipes:
                for index in range(2):
                    reader, writer = os.pipe()
                    streams[index] = ours.enter_context(open(reader, "rb", buffering=0))
                    theirs.callback(os.close, writer)
                    given[1 + index] = writer
            pid = self._ask({"environment": dict(environment)}, given)
            ours.pop_all()
            return ForkedWorker(pid, stdout=streams[0], stderr=streams[1])

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        try:
            self._channel.settimeout(_ANSWER_LIMIT_S)
            self._send(request, descriptors)
            data = self._channel.recv(MOST_BYTES)
        except OSError as error:
            raise PreloaderLostError(f"does not answer: {error}") from None
        if not data:
            raise PreloaderLostError("has ended")
        answer = json.loads(data)
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return int(answer["pid"])

    def _send(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Sends a request; an environment may be larger than a message."""
        with open(os.memfd_create("coarse-preloader"), "wb") as file:
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._channel, [b"!"], [file.fileno(), *descriptors])

    def close(self) -> None:
        """Lets it end, without waiting for that. Idempotent."""
        self.process.returncode = 0  # the supervisor reaps it, so Popen must not wait for it
        self._channel.close()

    def kill(self) -> None:
        """Ends it by SIGKILL, while it imports or hangs. Its process must not have been reaped."""
        signal_all([self.pid], signal.SIGKILL)


def _with_sitecustomize(environment: Mapping[str, str], channel: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PYTHON_PATH), environment.get("PYTHONPATH", "")]))
    return {**environment, "PYTHONPATH": path, CHANNEL: str(channel)}

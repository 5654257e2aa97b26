"""Requests of `coarse run --join` to the launcher of a running job, which starts the workers itself.

The launcher listens at a socket as those of coarse.status.address. A request is a line of JSON, as are the answers:
one for each worker that starts, then one when it takes part in the training or has ended before, or a single refusal.
The launcher closes the connection after the last one. Neither secrets nor anything about workers leaves the launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

from coarse.security.local_sockets import peer_of
from coarse.status.address import LAUNCHER, Address, job_id

Answer: TypeAlias = dict[str, Any]
"""An answer, as JSON values."""

_MOST_BYTES = 256
_MOST_PENDING = 16
_CONNECT_TIMEOUT_S = 5.0


class JoinRequest:
    """A request, at the launcher.

    Args:
        connection: To the process that asks.
        num_workers: How many workers are to join.
    """

    def __init__(self, connection: socket.socket, num_workers: int) -> None:
        self._connection = connection
        self.num_workers = num_workers
        self._num_open = num_workers

    def refuse(self, reason: str) -> None:
        """Starts nothing, for a reason."""
        self._tell({"refused": reason})
        self._connection.close()

    def tell_start(self, rank: int, pid: int) -> None:
        """A worker starts."""
        self._tell({"started": rank, "pid": pid})

    def tell_end(self, rank: int, how: str = "") -> None:
        """A worker takes part in the training, or has ended before; then `how` says how."""
        self._tell({"failed": rank, "how": how} if how else {"entered": rank})
        self._num_open -= 1
        if self._num_open == 0:
            self._connection.close()

    def _tell(self, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more; the workers go on
            self._connection.send(json.dumps(answer).encode() + b"\n")


class JoinRequests:
    """A launcher's socket for requests. It blocks nowhere, and handles events in its caller's selector.

    Args:
        job: The job's name, as in Attempt.
        selector: Handles events by calling the data of their keys.
        take: Takes a request.

    Raises:
        OSError: If it cannot listen.
    """

    def __init__(
        self, job: str, selector: selectors.BaseSelector, take: Callable[[JoinRequest], object]
    ) -> None:
        self._selector = selector
        self._take = take
        self._pending: list[socket.socket] = []  # those that have not said what they ask for
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        try:
            self._listener.bind(Address.of_this_process(job_id(job), LAUNCHER, 0).name)
            self._listener.listen(_MOST_PENDING)
        except BaseException:
            self._listener.close()
            raise
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Ends all connections that have not become requests, and takes no more."""
        for connection in list(self._pending):
            self._drop(connection)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has left again
            return
        connection.setblocking(False)
        pid, user = peer_of(connection)
        is_strange = user != os.geteuid() or pid == 0  # 0: of another container, on the host's network
        if is_strange or len(self._pending) == _MOST_PENDING:
            connection.close()
            return
        self._pending.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, connection))

    def _read(self, connection: socket.socket) -> None:
        self._forget(connection)
        num_workers = 0
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            num_workers = int(json.loads(connection.recv(_MOST_BYTES))["join"])
        if num_workers < 1:
            connection.close()
        else:
            self._take(JoinRequest(connection, num_workers))

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._pending.remove(connection)
        self._selector.unregister(connection)


def ask_to_join(launcher: Address, num_workers: int) -> Iterator[Answer]:
    """Asks a launcher to start workers; yields its answers until the last one.

    Raises:
        OSError: If it cannot be reached, or another process listens at its address.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        connection.connect(launcher.name)
        if peer_of(connection) != (launcher.pid, os.geteuid()):
            raise PermissionError(f"another process listens in place of {launcher.process}")
        connection.sendall(json.dumps({"join": num_workers}).encode())
        connection.settimeout(None)  # workers import and build for as long as they need, and have time-outs
        with connection.makefile("r", encoding="utf-8") as lines:
            yield from map(json.loads, lines)

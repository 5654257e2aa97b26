"""The workers of a memory device: admits them, reads their messages, notices their end."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from coarse.errors import ProtocolError
from coarse.proxy import outbox
from coarse.proxy.event_loop import EventLoop
from coarse.security.local_sockets import peer_of
from coarse.security.strangers import Acceptor, RareWarnings
from coarse.wire.device_job import DeviceJob
from coarse.wire.messages import ControlChannel, Message, Received, int_field
from coarse.wire.socket_directory import OwnSocket, socket_path

logger = logging.getLogger(__name__)

_MOST_UNPROVED = 64
_HELLO_TIMEOUT_S = 30.0


class WorkerConnection:
    """A connection that becomes a worker's after its hello message."""

    def __init__(self, loop: EventLoop, channel: ControlChannel, pid: int) -> None:
        self._loop = loop
        self.channel = channel
        self.pid = pid
        self.client = -1
        self.entry = ""
        """A newcomer's mark of its attempt to enter."""
        self.pidfd = -1
        self.has_left = False
        self.opened_s = time.monotonic()

    @property
    def is_unproved(self) -> bool:
        """Whether it has not sent hello, so that it may come from any process of this user."""
        return self.client < 0

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a message to the worker, or as much as fits if it has left; its pidfd reports its death."""
        outbox.send(self._loop, self.channel, message, fds)

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class WorkerHandler(Protocol):
    """A memory device's handlers for events of its workers."""

    def is_vacant(self, client: int) -> bool:
        """Whether a newcomer may take the place of this worker, which was admitted and is lost."""

    def worker_admitted(self, worker: WorkerConnection) -> None:
        """The worker has sent hello; worker.client is its number."""

    def worker_asked(self, worker: WorkerConnection, request: Received) -> None:
        """The worker has sent a request; its descriptors are closed afterwards.

        Raises:
            ProtocolError: If the request is not allowed.
        """

    def worker_misbehaved(self, worker: WorkerConnection, reason: str) -> None:
        """The worker has violated the control protocol, and must be removed."""

    def worker_died(self, worker: WorkerConnection) -> None:
        """The worker's process has ended or closed the connection without a goodbye message."""

    def dismissed(self) -> None:
        """No more workers will join."""

    def device_replaced(self, device: int, fd: int) -> None:
        """A worker has started another memory device as the replacement of a lost one.

        Args:
            device: Number of the device.
            fd: A connected socket to the replacement; the handler takes ownership.

        Raises:
            ProtocolError: If it is too late for a replacement.
        """


class WorkerConnections:
    """Every connection of a memory device to a worker. Used from the control thread alone.

    Args:
        job: The device's place in the session; this object takes ownership of the listening socket.
        loop: Watches sockets and processes.
        handler: Handles events of workers.
    """

    def __init__(self, job: DeviceJob, loop: EventLoop, handler: WorkerHandler) -> None:
        self._job = job
        self._loop = loop
        self._handler = handler
        self._warnings = RareWarnings(logger, f"[md{job.device}]")
        self._acceptor = Acceptor(socket.socket(fileno=job.listen_fd), self._warnings)
        self.socket = OwnSocket(Path(socket_path(job.directory, job.device)))
        """The socket to which workers connect."""
        self._connections: list[WorkerConnection] = []
        self._admitted: dict[int, WorkerConnection] = {}
        self._processes: list[int] = []  # pidfds of admitted workers, if another attempt may follow
        loop.watch(self._acceptor.fileno(), self._accept)

    @property
    def is_complete(self) -> bool:
        """Whether every worker of the node that is there from the start has been admitted."""
        return len(self._admitted) >= len(self._job.founders)

    @property
    def is_empty(self) -> bool:
        """Whether no worker has been admitted."""
        return not self._admitted

    @property
    def have_all_left(self) -> bool:
        """Whether all admitted workers have left."""
        return all(worker.has_left for worker in self._admitted.values())

    @property
    def departed(self) -> set[int]:
        """Clients that were admitted and have left."""
        return {client for client, worker in self._admitted.items() if worker.has_left}

    def __getitem__(self, client: int) -> WorkerConnection:
        """An admitted worker."""
        return self._admitted[client]

    def present(self, clients: Sequence[int]) -> list[WorkerConnection]:
        """Those of `clients` that were admitted and have not left."""
        admitted = [self._admitted[client] for client in clients if client in self._admitted]
        return [worker for worker in admitted if not worker.has_left]

    def send(self, client: int, message: Message, fds: Sequence[int]) -> None:
        """Sends a message to an admitted worker; does nothing if it is gone."""
        if not self._admitted[client].has_left:
            self._admitted[client].send(message, fds)

    def forget(self, worker: WorkerConnection) -> None:
        """Stops reading from a worker; its connection stays open for further messages to it."""
        worker.has_left = True
        for fd in (worker.channel.fileno(), worker.pidfd):
            if fd >= 0:
                self._loop.unwatch(fd)

    def await_end(self, worker: WorkerConnection, callback: Callable[[], object]) -> None:
        """Stops reading from a worker; calls back when its process has ended."""
        self.forget(worker)

        def ended() -> None:
            self._loop.unwatch(worker.pidfd)
            callback()

        if worker.pidfd >= 0:
            self._loop.watch(worker.pidfd, ended)
        else:  # it ended before it was admitted
            callback()

    def await_ends(self, deadline_s: float) -> bool:
        """Waits until the processes of all admitted workers have ended, so that none can write any more.

        Returns:
            Whether they ended before `deadline_s` of the monotonic clock.
        """
        for process in self._processes:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            if not poll.poll(max(0.0, 1e3 * (deadline_s - time.monotonic()))):
                return False
        return True

    def close(self) -> None:
        """Closes all connections."""
        while self._processes:
            os.close(self._processes.pop())
        for worker in self._connections:
            worker.close()
        self._acceptor.close()
        self.socket.close()

    def drop_silent(self) -> None:
        """Closes connections that have not sent hello in time."""
        limit_s = time.monotonic() - _HELLO_TIMEOUT_S
        for worker in [each for each in self._connections if each.is_unproved and each.opened_s < limit_s]:
            self._drop(worker, f"sent no hello within {_HELLO_TIMEOUT_S:.0f} s")

    def _accept(self) -> None:
        connection = self._acceptor.accept()
        if connection is None:
            return
        pid, user = peer_of(connection)
        if user != os.geteuid():
            self._warnings.warn(f"refused a connection of process {pid} of user {user}")
            connection.close()
            return
        connection.setblocking(False)
        worker = WorkerConnection(self._loop, ControlChannel(connection, is_proved=False), pid)
        unproved = [each for each in self._connections if each.is_unproved]
        if len(unproved) >= _MOST_UNPROVED:
            self._drop(
                unproved[0], f"sent no hello, and {len(unproved)} connections without one are too many"
            )
        self._connections.append(worker)
        self._loop.watch(connection.fileno(), lambda: self._read(worker))

    def _drop(self, worker: WorkerConnection, why: str) -> None:
        """Closes a connection that has not sent hello, and sends the reason."""
        self._warnings.warn(f"dropped a connection of process {worker.pid}: {why}")
        self._lose(worker)

    def _read(self, worker: WorkerConnection) -> bool:
        """Serves the next frame of a worker; returns False if none has arrived."""
        try:
            received = worker.channel.receive()
            if received is not None:
                try:
                    self._take(worker, received)
                finally:
                    received.close()
        except BlockingIOError:
            return False
        except (EOFError, OSError):
            self._lose(worker)
            return False
        except Exception as error:  # concerns one peer; serve the others
            self._reject(worker, error)
        return True

    def _reject(self, worker: WorkerConnection, error: Exception) -> None:
        """Removes a peer that sent an invalid message."""
        if worker.is_unproved:
            self._drop(worker, str(error))
        elif isinstance(error, ProtocolError):
            self._handler.worker_misbehaved(worker, f"broke the control protocol: {error}")
        else:
            logger.exception("[md%s] a request of process %s failed", self._job.device, worker.pid)
            self._handler.worker_misbehaved(worker, f"sent a request that failed: {error}")

    def _take(self, worker: WorkerConnection, received: Received) -> None:
        if worker.client >= 0:
            self._handler.worker_asked(worker, received)
        elif received.kind == "hello":
            self._admit(worker, received.message)
        elif received.kind == "dismiss":
            self._check_token(received.message)
            self._handler.dismissed()
        elif received.kind == "replace":
            self._check_token(received.message)
            device = int_field(received.message, "device", high=self._job.num_devices - 1)
            if device == self._job.device or len(received.fds) != 1:
                raise ProtocolError("'replace' does not name another memory device, or has no connection")
            self._handler.device_replaced(device, received.fds.pop())
            worker.send({"type": "replaced"})
        else:
            raise ProtocolError(f"{received.kind!r} arrived before hello")

    def _admit(self, worker: WorkerConnection, message: Message) -> None:
        self._check_token(message)
        client = int_field(message, "client", high=self._job.num_clients - 1)
        is_newcomer = bool(message.get("entry"))
        if is_newcomer and not self._handler.is_vacant(client):
            return self._turn_away(worker)
        if client in (*self._admitted, *self._job.vacant) and not is_newcomer:
            raise ProtocolError(f"worker {self._job.rank(client)} has already joined, or joins as a newcomer")
        worker.client = client
        worker.entry = str(message.get("entry", ""))
        worker.channel.trust()
        self._admitted[client] = worker
        # A forked child of the worker keeps the socket open, so watching the socket alone would miss the death.
        with contextlib.suppress(OSError):
            worker.pidfd = os.pidfd_open(worker.pid)
            self._loop.watch(worker.pidfd, lambda: self._bury(worker))
            if self._job.keep_s:
                self._processes.append(os.dup(worker.pidfd))
        if self._job.keep_s and self.is_complete:
            self._loop.unwatch(self._acceptor.fileno())  # later connections belong to the next attempt
        self._handler.worker_admitted(worker)

    def _turn_away(self, worker: WorkerConnection) -> None:
        """Lets a newcomer try again later: the devices are not done with the former worker of its place."""
        worker.send({"type": "occupied"})
        self._lose(worker)

    def _check_token(self, message: Message) -> None:
        token = message.get("token")
        if not isinstance(token, str) or not hmac.compare_digest(_bytes(token), _bytes(self._job.token)):
            raise ProtocolError(f"{message['type']} with a wrong token")

    def _bury(self, worker: WorkerConnection) -> None:
        """Reads the last messages of a process that ended: goodbye may be among them."""
        while not worker.has_left and self._read(worker):
            pass
        self._lose(worker)

    def _lose(self, worker: WorkerConnection) -> None:
        if worker.has_left:
            return
        if worker.client >= 0:
            self._handler.worker_died(worker)
            return
        self.forget(worker)
        self._connections.remove(worker)
        worker.close()


def _bytes(token: str) -> bytes:
    # JSON can carry halves of surrogate pairs, which are not characters.
    return token.encode("utf-8", "surrogatepass")

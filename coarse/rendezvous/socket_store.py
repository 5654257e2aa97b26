"""A rendezvous store that worker 0 serves over a socket, where no framework brings one (store_server.py)."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from coarse.errors import RendezvousError, follow_up
from coarse.process.scratch import hold
from coarse.rendezvous.store_server import (
    ADD,
    ANSWER,
    COUNT,
    GET,
    GREETING,
    MAGIC,
    NONCE_BYTES,
    REFUSED,
    REQUEST,
    SET,
    VALUE,
    WELCOME,
    StoreServer,
)
from coarse.security import local_sockets, private_directories
from coarse.security.job_secret import PROOF_BYTES, JobSecret
from coarse.security.listening import host_and_port, listen_for_workers, rendezvous_host
from coarse.store import Store

_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.05
_CONNECT_ATTEMPT_S = 5.0
_MOST_TRIES = 100
_DIRECTORY_OF_STORES = "stores"
_SOCKET = "socket"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Where a store is served for workers of several nodes.

    Args:
        host: Host of the process that serves it.
        port: There.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """Where a store is served for workers of one node and one user: a Unix socket in a private directory.

    Args:
        name: Name of the job.
    """

    name: str

    def __str__(self) -> str:
        return f"{_DIRECTORY_OF_STORES}/{self.name}"


Address = TcpAddress | LocalAddress


def serve(address: Address, *, secret: JobSecret | None = None, timeout_s: float = 600.0) -> StoreServer:
    """Serves a store.

    Args:
        address: Where.
        secret: The job's; without one everybody who reaches the address may read and write.
        timeout_s: How long a peer may take to send a request, or to take an answer.

    Raises:
        OSError: If the address is taken.
    """
    secret = secret or JobSecret()
    if isinstance(address, TcpAddress):
        return StoreServer(_TcpDoor(address), secret=secret, timeout_s=timeout_s)
    return StoreServer(_LocalDoor(address), secret=secret, timeout_s=timeout_s, user=os.geteuid())


class _TcpDoor:
    def __init__(self, address: TcpAddress) -> None:
        self.listener = listen_for_workers(address.host, address.port)

    def close(self) -> None:
        """Does nothing: nothing leads there but the socket itself."""


class _LocalDoor:
    """A socket in a directory that goes with it.

    An abstract name could be taken in advance by another user, and leaves no file; this one leaves none once the
    workers are in.
    """

    def __init__(self, address: LocalAddress) -> None:
        self._pid = os.getpid()
        private_directories.remove_abandoned()
        self._directory = _make_directory(address)
        self._lock_fd = hold(self._directory)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with local_sockets.short_address(self._directory / _SOCKET) as place:
            self.listener.bind(place)
        self.listener.listen(128)

    def close(self) -> None:
        if self._lock_fd < 0 or os.getpid() != self._pid:
            return
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = -1
        for path in (self._directory.parent, self._directory.parent.parent):
            with contextlib.suppress(OSError):  # not empty, or gone
                path.rmdir()


def _make_directory(address: LocalAddress) -> Path:
    """Makes the directory of a store, empty.

    Raises:
        OSError: If it cannot be made, or another process serves a store there.
    """
    for attempt in range(_MOST_TRIES):
        try:
            if (before := private_directories.find(str(address))) is not None:
                with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):  # its process was killed
                    local_sockets.connect(before / _SOCKET, socket.SOCK_STREAM).close()
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
                shutil.rmtree(before, ignore_errors=True)
            directory = private_directories.make_root() / str(address)
            directory.parent.mkdir(mode=0o700, exist_ok=True)
            directory.mkdir(mode=0o700)
            break
        except FileNotFoundError:  # one that ended at this moment has removed the parent
            if attempt == _MOST_TRIES - 1:
                raise
    return directory


class SocketStore:
    """A coarse.store.Store that serve() serves. Threads take turns.

    Args:
        address: Address of the server.
        timeout_s: How long to wait until it is there, and for each of its answers.
        secret: The job's, which the server must know.

    Raises:
        RendezvousError: If it does not come, or is a stranger.
    """

    def __init__(self, address: Address, *, timeout_s: float, secret: JobSecret | None = None) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket = _connect(address, timeout_s, secret or JobSecret())

    def set(self, key: str, value: bytes) -> None:
        self._ask(SET, key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        while (value := self._ask(GET, key, b"")) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no process set {key!r} within {timeout_s:.1f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return value

    def add(self, key: str, amount: int) -> int:
        value = self._ask(ADD, key, COUNT.pack(amount))
        assert value is not None
        return int(COUNT.unpack(value)[0])

    def close(self) -> None:
        """Leaves the store. Idempotent."""
        self._socket.close()

    def _ask(self, operation: bytes, key: str, value: bytes) -> bytes | None:
        name = key.encode()
        with self._lock:
            try:
                self._socket.settimeout(self._timeout_s)
                self._socket.sendall(REQUEST.pack(operation, len(name), len(value)) + name + value)
                status, length = ANSWER.unpack(_receive(self._socket, ANSWER.size, self._timeout_s))
                answer = _receive(self._socket, length, self._timeout_s)
            except OSError as error:
                self._socket.close()  # what comes later is no answer to what is asked next
                raise self._loss(error) from error
        if status == REFUSED:
            raise RendezvousError(
                f"worker 0, which serves {self._address}, refused {key!r}: {answer.decode()}"
            )
        return answer if status == VALUE else None

    def _loss(self, error: OSError) -> RendezvousError:
        if isinstance(error, TimeoutError):
            return RendezvousError(
                f"worker 0, which serves the rendezvous at {self._address}, has not answered within "
                f"{self._timeout_s:.1f} s. It is stopped or can no longer be reached."
            )
        text = f"worker 0, which served the rendezvous at {self._address}, is gone ({error})"
        return RendezvousError(follow_up(text, "worker 0"))


class PrefixStore:
    """A part of another store, in which keys are its own.

    Args:
        store: The other one.
        prefix: Put before every key.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._store.get(f"{self._prefix}/{key}", timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(f"{self._prefix}/{key}", amount)


def _connect(address: Address, timeout_s: float, secret: JobSecret) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        try:
            return _try_to_connect(address, min(_CONNECT_ATTEMPT_S, left_s), secret)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"no process answered at {address} within {timeout_s:.0f} s ({error}). Start worker 0, or "
                    "check the address that the launcher sets."
                ) from error
        time.sleep(_LONGEST_POLL_S)


def _try_to_connect(address: Address, timeout_s: float, secret: JobSecret) -> socket.socket:
    if isinstance(address, TcpAddress):
        connected = socket.create_connection((rendezvous_host(address.host), address.port), timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        directory = private_directories.find(str(address))
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        connected = local_sockets.connect(directory / _SOCKET, socket.SOCK_STREAM, timeout_s=timeout_s)
    try:
        _greet(connected, address, timeout_s, secret)
    except BaseException:
        connected.close()
        raise
    return connected


def _greet(connected: socket.socket, address: Address, timeout_s: float, secret: JobSecret) -> None:
    """The handshake: both ends prove that they know the job's secret."""
    greeting = GREETING.pack(MAGIC, secrets.token_bytes(NONCE_BYTES))
    connected.sendall(greeting)
    answer = _receive(connected, NONCE_BYTES + PROOF_BYTES, timeout_s)
    challenge = greeting + answer[:NONCE_BYTES]
    if not secret.is_proof(answer[NONCE_BYTES:], b"store server", challenge):
        raise RendezvousError(
            f"refused to join the workers at {address}: the process that listens there does not have this "
            "job's COARSE_JOB_SECRET. It does not belong to this job, or worker 0 was started with another "
            "secret or none."
        )
    connected.sendall(secret.prove(b"store client", challenge))
    if _receive(connected, len(WELCOME), timeout_s) != WELCOME:
        raise RendezvousError(
            f"the process that listens at {address} speaks another protocol; it is not worker 0"
        )


def _receive(peer: socket.socket, num_bytes: int, timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    received = bytearray()
    while len(received) < num_bytes:
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        piece = peer.recv(num_bytes - len(received))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        received += piece
    return bytes(received)

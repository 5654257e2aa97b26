"""A rendezvous store that one process serves over a socket, where no framework brings one.

A request is a header (operation, lengths of key and value), the key and the value; the answer a header and a value.
Lengths are capped, and whoever does not keep to this is dropped. Nothing that is received is ever executed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

from coarse.errors import RendezvousError
from coarse.store import Store

_REQUEST = struct.Struct("!cHI")
_ANSWER = struct.Struct("!?I")
_SET, _GET, _ADD = b"S", b"G", b"A"
_COUNT = struct.Struct("!q")
_MOST_VALUE_BYTES = 16 << 20
_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.05
_PEER_CREDENTIALS = struct.Struct("3i")
_CONNECT_ATTEMPT_S = 5.0


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Where a store is served for workers of several nodes.

    Args:
        host: Of the process that serves it.
        port: There.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """Where a store is served for workers of one node and one user: an abstract Unix socket, which leaves no file.

    Args:
        name: Of the job.
    """

    name: str

    def __str__(self) -> str:
        return f"@coarse/{os.getuid()}/{self.name}"


Address = TcpAddress | LocalAddress


class StoreServer:
    """Serves a store until close(), in threads of its own.

    Raises:
        OSError: If the address is taken, or not this machine's.
    """

    def __init__(self, address: Address) -> None:
        server = _TcpServer if isinstance(address, TcpAddress) else _LocalServer
        place: Any = ("", address.port) if isinstance(address, TcpAddress) else _abstract(address)
        self._server = server(place, _Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Of a TcpAddress, also where 0 was asked for."""
        address: Any = self._server.server_address
        return int(address[1])

    def close(self) -> None:
        """Ends it. Idempotent."""
        self._server.shutdown()
        self._server.server_close()


class SocketStore:
    """A coarse.store.Store that a StoreServer serves. Threads take turns.

    Args:
        address: Of the server.
        timeout_s: How long to wait until it is there.

    Raises:
        RendezvousError: If it does not come.
    """

    def __init__(self, address: Address, *, timeout_s: float) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._socket = _connect(address, timeout_s)

    def set(self, key: str, value: bytes) -> None:
        self._ask(_SET, key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        while (value := self._ask(_GET, key, b"")) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"nobody set {key!r} within {timeout_s:.1f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return value

    def add(self, key: str, amount: int) -> int:
        value = self._ask(_ADD, key, _COUNT.pack(amount))
        assert value is not None
        return int(_COUNT.unpack(value)[0])

    def close(self) -> None:
        """Leaves the store. Idempotent."""
        self._socket.close()

    def _ask(self, operation: bytes, key: str, value: bytes) -> bytes | None:
        name = key.encode()
        with self._lock:
            try:
                self._socket.sendall(_REQUEST.pack(operation, len(name), len(value)) + name + value)
                is_there, length = _ANSWER.unpack(_receive(self._socket, _ANSWER.size))
                answer = _receive(self._socket, length)
            except OSError as error:
                raise RendezvousError(
                    f"worker 0, which served {self._address} for the workers to find each other, is gone ({error}). "
                    "Look at its output."
                ) from error
        return answer if is_there else None


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


class _Values:
    """What a store holds. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[bytes, bytes] = {}
        self._counters: dict[bytes, int] = {}

    def answer(self, operation: bytes, key: bytes, value: bytes) -> bytes | None:
        with self._lock:
            if operation == _SET:
                self._values[key] = value
                return b""
            if operation == _GET:
                return self._values.get(key)
            self._counters[key] = self._counters.get(key, 0) + _COUNT.unpack(value)[0]
            return _COUNT.pack(self._counters[key])


class _TcpServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self.values = _Values()
        super().__init__(*arguments)


class _LocalServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self.values = _Values()
        super().__init__(*arguments)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return _user_at(request) == os.getuid()


class _Handler(socketserver.BaseRequestHandler):
    server: _TcpServer | _LocalServer

    def handle(self) -> None:
        with contextlib.suppress(OSError, struct.error):
            while True:
                header = _receive(self.request, _REQUEST.size)
                operation, key_bytes, value_bytes = _REQUEST.unpack(header)
                if operation not in (_SET, _GET, _ADD) or value_bytes > _MOST_VALUE_BYTES:
                    return
                key = _receive(self.request, key_bytes)
                answer = self.server.values.answer(operation, key, _receive(self.request, value_bytes))
                self.request.sendall(_ANSWER.pack(answer is not None, len(answer or b"")) + (answer or b""))


def _connect(address: Address, timeout_s: float) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        try:
            return _try_to_connect(address, min(_CONNECT_ATTEMPT_S, left_s))
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"nobody answered at {address} within {timeout_s:.0f} s ({error}). Start worker 0, or check the "
                    "address that the launcher gives."
                ) from error
        time.sleep(_LONGEST_POLL_S)


def _try_to_connect(address: Address, timeout_s: float) -> socket.socket:
    if isinstance(address, TcpAddress):
        connected = socket.create_connection((address.host, address.port), timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(_abstract(address))
            if _user_at(connected) != os.getuid():
                raise PermissionError("another user serves it")
        except OSError:
            connected.close()
            raise
    connected.settimeout(None)
    return connected


def _abstract(address: LocalAddress) -> str:
    return "\0" + str(address)[1:]


def _user_at(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(credentials)[1])


def _receive(peer: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        piece = peer.recv(num_bytes - len(received))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        received += piece
    return bytes(received)

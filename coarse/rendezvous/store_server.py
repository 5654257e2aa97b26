"""Serves a rendezvous store over a socket, where no framework brings one. socket_store.py has the other end.

A connection begins with a handshake in which both ends prove that they know the job's secret; then it asks. What a
peer can hold is bounded: connections, the time for a handshake or a request, bytes of a key, of a value, of all.
Nothing that is received is ever executed.

    client: magic, nonce          server: nonce, proof          client: proof          server: welcome
    client: operation, lengths of key and value, both           server: status, length, value
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from typing import Protocol

from coarse.security.job_secret import PROOF_BYTES, JobSecret
from coarse.security.local_sockets import peer_of
from coarse.security.strangers import Acceptor, RareWarnings

logger = logging.getLogger(__name__)

MAGIC = b"COARSES1"
NONCE_BYTES = 32
GREETING = struct.Struct(f"!{len(MAGIC)}s{NONCE_BYTES}s")
WELCOME = b"\1"
REQUEST = struct.Struct("!cHI")
ANSWER = struct.Struct("!BI")
SET, GET, ADD = b"S", b"G", b"A"
NOTHING, VALUE, REFUSED = range(3)
COUNT = struct.Struct("!q")

MOST_KEY_BYTES = 4 << 10
MOST_VALUE_BYTES = 16 << 20
MOST_BYTES = 256 << 20
"""Limit for the contents of a store, and a second one for all incomplete requests."""

_BYTES_BESIDE_A_VALUE = 256  # what keeping it takes, about
_MOST_UNPROVED = 256
_MOST_CONNECTIONS = 4096
_HANDSHAKE_TIMEOUT_S = 10.0
_SWEEP_INTERVAL_S = 1.0
_READ_BYTES = 1 << 16


class StoreError(Exception):
    """A request that cannot be served; the connection stays."""


class ProtocolError(Exception):
    """A peer sent something other than a request; it is dropped."""


class Door(Protocol):
    """Where peers come in."""

    listener: socket.socket
    """Which becomes the server's."""

    def close(self) -> None:
        """Removes the entry by which others find it. Idempotent."""


class Values:
    """The entries of a store."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._counters: dict[bytes, int] = {}
        self._num_bytes = 0

    def answer(self, operation: bytes, key: bytes, value: bytes) -> bytes | None:
        """Executes a request; returns the value of its answer, None if there is none.

        Raises:
            StoreError: If that cannot be.
        """
        if operation == GET:
            return self._values.get(key)
        if operation == SET:
            self._take_room(key, key in self._values, len(value) - len(self._values.get(key, b"")))
            self._values[key] = value
            return b""
        if len(value) != COUNT.size:
            raise StoreError(f"a number of {len(value)} bytes")
        self._take_room(key, key in self._counters, 0)
        count = self._counters.get(key, 0) + COUNT.unpack(value)[0]
        if not -(1 << 63) <= count < 1 << 63:
            raise StoreError("a counter would overflow")
        self._counters[key] = count
        return COUNT.pack(count)

    def _take_room(self, key: bytes, is_there: bool, num_bytes: int) -> None:
        needed = num_bytes + (0 if is_there else len(key) + _BYTES_BESIDE_A_VALUE)
        if self._num_bytes + needed > MOST_BYTES:
            raise StoreError(f"it is full: it keeps {self._num_bytes} of at most {MOST_BYTES} bytes")
        self._num_bytes += needed


class _Peer:
    """A connection, from the handshake on.

    Args:
        connection: Which now belongs to this object.
        secret: The job's.
        values: The store's entries.
    """

    def __init__(self, connection: socket.socket, secret: JobSecret, values: Values) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._secret = secret
        self._values = values
        self._challenge = b""
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self.is_proved = False
        self.waits_since_s = time.monotonic()
        """When the peer's current action began: its handshake, a request, taking an answer."""

    @property
    def num_bytes(self) -> int:
        """Bytes of an incomplete request."""
        return len(self._received)

    @property
    def is_busy(self) -> bool:
        """Whether it has begun something that is not finished."""
        return not self.is_proved or bool(self._received or self._unsent)

    @property
    def events(self) -> int:
        """For selectors: it is not heard before it has taken its answer."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def proceed(self) -> None:
        """Takes received data, and sends as much as the peer takes.

        Raises:
            ProtocolError: If it is no peer of this store.
            OSError: If it is gone.
        """
        was_busy = self.is_busy
        if not self._unsent:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._received += data
        self._send()
        while not self._unsent and self._serve():
            if self.is_proved:
                self.waits_since_s = time.monotonic()
            self._send()
        if not was_busy:
            self.waits_since_s = time.monotonic()

    def _send(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]

    def _serve(self) -> bool:
        """Serves the next thing that has come whole; whether there was one."""
        if not self._challenge:
            return self._greet()
        if not self.is_proved:
            return self._admit()
        return self._answer()

    def _take(self, num_bytes: int) -> bytes:
        taken = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return taken

    def _greet(self) -> bool:
        if not MAGIC.startswith(self._received[: len(MAGIC)]):
            raise ProtocolError("it speaks another protocol")
        if len(self._received) < GREETING.size:
            return False
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._challenge = self._take(GREETING.size) + nonce
        self._unsent.append(memoryview(nonce + self._secret.prove(b"store server", self._challenge)))
        return True

    def _admit(self) -> bool:
        if len(self._received) < PROOF_BYTES:
            return False
        if not self._secret.is_proof(self._take(PROOF_BYTES), b"store client", self._challenge):
            raise ProtocolError("it does not have the secret of this job (COARSE_JOB_SECRET)")
        self.is_proved = True
        self._unsent.append(memoryview(WELCOME))
        return True

    def _answer(self) -> bool:
        if len(self._received) < REQUEST.size:
            return False
        operation, key_bytes, value_bytes = REQUEST.unpack_from(self._received)
        if operation not in (SET, GET, ADD):
            raise ProtocolError(f"it requests the unknown operation {operation!r}")
        if key_bytes > MOST_KEY_BYTES or value_bytes > MOST_VALUE_BYTES:
            raise ProtocolError(f"it sends a key of {key_bytes} bytes and a value of {value_bytes}")
        if len(self._received) < REQUEST.size + key_bytes + value_bytes:
            return False
        self._take(REQUEST.size)
        key, value = self._take(key_bytes), self._take(value_bytes)
        try:
            answer = self._values.answer(operation, key, value)
            status = NOTHING if answer is None else VALUE
        except StoreError as error:
            status, answer = REFUSED, str(error).encode()
        self._unsent.append(memoryview(ANSWER.pack(status, len(answer or b""))))
        if answer:
            self._unsent.append(memoryview(answer))
        return True


class StoreServer:
    """Serves a store until close(), in a thread of its own.

    Args:
        door: Where.
        secret: The job's; without one everybody who reaches the door may read and write.
        timeout_s: How long a peer may take to send a request, or to take an answer.
        user: Whose processes alone are let in; None for a door of TCP.
    """

    def __init__(self, door: Door, *, secret: JobSecret, timeout_s: float, user: int | None = None) -> None:
        self._door = door
        self._secret = secret
        self._timeout_s = timeout_s
        self._user = user
        self._values = Values()
        self._peers: list[_Peer] = []
        self._half_bytes = 0  # of requests that have not come whole
        self._selector = selectors.DefaultSelector()
        self._warnings = RareWarnings(logger, "[store]")
        self._acceptor: Acceptor | None = Acceptor(door.listener, self._warnings)
        self.port = 0 if user is not None else int(door.listener.getsockname()[1])
        """The port of a TCP listener, also if 0 was asked for."""
        self._is_shutting = self._is_closed = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._wake)
        self._selector.register(self._acceptor, selectors.EVENT_READ, self._accept)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="coarse-store", daemon=True)
        self._thread.start()

    def shut_door(self) -> None:
        """Accepts no more connections; existing ones stay. Idempotent."""
        self._is_shutting = True
        self._call()
        self._door.close()

    def close(self) -> None:
        """Ends it. Idempotent."""
        self._is_closed = True
        self._call()
        self._thread.join()
        self._door.close()

    def _call(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # ---- of the thread ----

    def _serve(self) -> None:
        next_sweep_s = 0.0
        while not self._is_closed:
            for key, _ in self._selector.select(_SWEEP_INTERVAL_S):
                if isinstance(key.data, _Peer):
                    if key.data.fileno() >= 0:  # another one of this round may have had it dropped
                        self._proceed(key.data)
                else:
                    key.data()
            if time.monotonic() >= next_sweep_s:
                next_sweep_s = time.monotonic() + _SWEEP_INTERVAL_S
                self._sweep()
        self._end()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        if self._is_shutting and self._acceptor is not None:
            self._selector.unregister(self._acceptor)
            self._acceptor.close()
            self._acceptor = None

    def _accept(self) -> None:
        connection = None if self._acceptor is None else self._acceptor.accept()
        if connection is None:
            return
        if self._user is not None:
            pid, user = peer_of(connection)
            if user != self._user:
                self._warnings.warn(f"refused a connection of process {pid} of user {user}")
                connection.close()
                return
        if len(self._peers) >= _MOST_CONNECTIONS:
            self._warnings.warn(f"turned a connection away: {len(self._peers)} are already open")
            connection.close()
            return
        unproved = [peer for peer in self._peers if not peer.is_proved]
        if len(unproved) >= _MOST_UNPROVED:
            self._drop(unproved[0], f"it has not proved the secret, nor have {len(unproved)} others")
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(connection, self._secret, self._values)
        self._peers.append(peer)
        self._selector.register(peer, peer.events, peer)

    def _proceed(self, peer: _Peer) -> None:
        events = peer.events
        self._half_bytes -= peer.num_bytes
        try:
            peer.proceed()
        except BlockingIOError:
            pass
        except (OSError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                self._warnings.warn(f"dropped a connection: {error}")
            self._half_bytes += peer.num_bytes
            self._forget(peer)
            return
        self._half_bytes += peer.num_bytes
        if peer.events != events:
            self._selector.modify(peer, peer.events, peer)
        if self._half_bytes > MOST_BYTES:
            self._drop(peer, f"incomplete requests take more than {MOST_BYTES} bytes")

    def _sweep(self) -> None:
        """Drops peers that do not finish a request or an answer in time."""
        now_s = time.monotonic()
        for peer in [peer for peer in self._peers if peer.is_busy]:
            limit_s = self._timeout_s if peer.is_proved else _HANDSHAKE_TIMEOUT_S
            if now_s - peer.waits_since_s > limit_s:
                self._drop(peer, f"it has not finished the request that it began {limit_s:.0f} s ago")

    def _drop(self, peer: _Peer, why: str) -> None:
        self._warnings.warn(f"dropped a connection: {why}")
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        self._selector.unregister(peer)
        self._peers.remove(peer)
        self._half_bytes -= peer.num_bytes
        peer.close()

    def _end(self) -> None:
        for peer in self._peers:
            peer.close()
        if self._acceptor is not None:
            self._acceptor.close()
        self._selector.close()
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

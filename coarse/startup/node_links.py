"""Connects the memory devices of a job's nodes; the leader of each node does this before it starts its devices.

During the start, each node listens on one address, publishes it in the rendezvous store, and connects to every node
of a lower number. Both ends prove that they have a secret. It combines the job's secret with a random one that goes
through the store and never over these connections. Other callers are rejected. docs/design/nodes.md describes the
handshake.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from coarse.env import job_secret
from coarse.errors import RendezvousError
from coarse.rendezvous.workers import PROGRESS_INTERVAL_S, NodeMap, PeerWatch
from coarse.security.node_ports import NodePorts
from coarse.settings import Settings
from coarse.startup.address_translation import ENDS_BYTES, ends_of, translation
from coarse.startup.node_address import address_of_this_node, describe_interfaces, is_loopback
from coarse.store import Store
from coarse.wire.reconnection_plan import NodeConnection, ReconnectionPlan

logger = logging.getLogger(__name__)

_MAGIC = b"COARSE node link"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HELLO = struct.Struct(f"<{len(_MAGIC)}sIII{_NONCE_BYTES}s")  # magic, from node, to node, connection, nonce
_WELCOME = b"\1"
_BACKLOG = 256
_HANDSHAKE_TIMEOUT_S = 5.0
_LOOK_INTERVAL_S = 0.25
_RETRY_INTERVAL_S = 0.05
_MIN_RTT_OFFSET, _TCP_INFO_BYTES = 148, 152  # of tcpi_min_rtt in struct tcp_info, and of its end
_MOST_HANDSHAKES = 64
_LOOPBACK = "127.0.0.1"


class _StrangerError(Exception):
    """The other end does not belong to this job."""


class _NothingSaidError(_StrangerError):
    """The other end closed the connection without a word."""


class _TranslatedError(Exception):
    """Addresses are translated between this node and one that belongs to the job.

    Args:
        caller: Number of that node.
        how: How they are translated.
    """

    def __init__(self, caller: int, how: str) -> None:
        super().__init__(how)
        self.caller = caller


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """Address of a node while the job starts.

    Args:
        host, port: Address of its listener.
        num_devices: Number of its planned memory devices.
        device_ports: The port that each of these holds, and at which it listens while a connection is broken.
        compression: How its memory devices send gradients: `node_compression` of its settings.
    """

    host: str
    port: int
    num_devices: int
    device_ports: Sequence[int]
    compression: str = "none"


class NodeLinks:
    """Connected sockets from one node to all others. A context manager that closes them.

    Two nodes with K and L memory devices share max(K, L) connections. Connection c belongs to device c mod K of one
    node and c mod L of the other, so that every device of either node has at least one.
    """

    def __init__(self, num_nodes: int, num_devices: int) -> None:
        self._num_nodes = num_nodes
        self._num_devices = num_devices
        self._sockets: dict[tuple[int, int], socket.socket] = {}
        self._holders: list[socket.socket] = []
        self._node = 0
        self._secret = b""
        self._addresses: dict[int, NodeAddress] = {}

    def hold_ports(self, host: str, ports: NodePorts) -> tuple[int, ...]:
        """Reserves a port for each device, at which it can listen later; returns them.

        Raises:
            OSError: If this machine cannot listen at `host`.
            RendezvousError: If there are too few.
        """
        for _ in range(self._num_devices):
            self._holders.append(ports.reserve(host))
        return tuple(holder.getsockname()[1] for holder in self._holders)

    def keep(self, node: int, secret: bytes, addresses: Mapping[int, NodeAddress]) -> None:
        """Keeps what devices need to connect again.

        Args:
            node: This node.
            secret: The secret of the node links.
            addresses: Addresses of the other nodes.
        """
        self._node, self._secret, self._addresses = node, secret, dict(addresses)

    def add(self, node: int, connection: int, link: socket.socket) -> None:
        """Adds a connection. Closes an earlier one of the same number, which must have failed."""
        link.settimeout(None)
        before = self._sockets.pop((node, connection), None)
        if before is not None:
            before.close()
        self._sockets[node, connection] = link

    def has(self, node: int, connection: int) -> bool:
        """Whether a connection exists."""
        return (node, connection) in self._sockets

    def fds_of_device(self, device: int) -> tuple[tuple[int, ...], ...]:
        """Descriptors of the connections of one of this node's devices, by the other node."""
        return tuple(
            tuple(
                link.fileno()
                for (other, connection), link in sorted(self._sockets.items(), key=lambda item: item[0])
                if other == node and connection % self._num_devices == device
            )
            for node in range(self._num_nodes)
        )

    @property
    def round_trip_us(self) -> int:
        """Microseconds to the farthest node and back."""
        return max(map(_round_trip_us, self._sockets.values()), default=0)

    def plan_of_device(self, device: int) -> ReconnectionPlan | None:
        """How one of this node's devices replaces connections that break; None in a job of one node."""
        if not self._holders:
            return None
        return ReconnectionPlan(
            node=self._node,
            secret=self._secret.hex(),
            held_fd=self._holders[device].fileno(),
            connections=tuple(
                NodeConnection(
                    node=node,
                    number=connection // self._num_devices,
                    connection=connection,
                    host=self._addresses[node].host,
                    port=self._addresses[node].device_ports[connection % self._addresses[node].num_devices],
                )
                for node, connection in sorted(self._sockets)
                if connection % self._num_devices == device
            ),
        )

    def close(self) -> None:
        """Closes this process's descriptors; devices that inherited them keep theirs. Idempotent."""
        while self._sockets:
            self._sockets.popitem()[1].close()
        while self._holders:
            self._holders.pop().close()

    def __enter__(self) -> NodeLinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def link_nodes(
    nodes: NodeMap,
    node: int,
    store: Store,
    *,
    num_devices: int,
    settings: Settings,
    watch: PeerWatch,
) -> NodeLinks:
    """Connects this node with all others; returns when all connections exist, at once in a job of one node.

    Args:
        nodes: The nodes of the job.
        node: Number of this node.
        store: Where nodes find each other.
        num_devices: Number of this node's planned memory devices.
        settings: The session's settings.
        watch: Notices workers that die during the wait.

    Raises:
        RendezvousError: If a node does not connect in time, or this node cannot listen.
        WorkerLostError: If a worker dies during the wait.
    """
    links = NodeLinks(nodes.num_nodes, num_devices)
    if nodes.num_nodes == 1:
        return links
    host = address_of_this_node(settings)
    ports = NodePorts.parse(settings.node_ports)
    try:
        listener = ports.listen(host, backlog=_BACKLOG)
    except OSError as error:
        raise RendezvousError(
            f"{nodes.describe(node)} cannot listen on {host}: {error}. Set COARSE_NODE_ADDRESS to an interface "
            f"of this node, or one of its addresses, that the others can reach: {describe_interfaces()}. The address "
            "of a router that translates addresses (NAT) is none of them."
        ) from error
    try:
        if node == 0:
            store.set("node secret", secrets.token_bytes(_PROOF_BYTES))
        own = NodeAddress(
            host=host,
            port=listener.getsockname()[1],
            num_devices=num_devices,
            device_ports=links.hold_ports(host, ports),
            compression=settings.node_compression,
        )
        store.set(f"node/{node}", json.dumps(asdict(own)).encode())
        _Linking(nodes, node, store, links, watch, settings.timeout_s).run(listener, own)
    except BaseException:
        links.close()
        raise
    finally:
        listener.close()
    return links


def _round_trip_us(link: socket.socket) -> int:
    """`tcpi_min_rtt` of a connection: unlike the smoothed round trip, free of what its ends computed meanwhile."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int.from_bytes(info[_MIN_RTT_OFFSET:_TCP_INFO_BYTES], sys.byteorder)


class _Linking:
    """Builds one node's connections to all others."""

    def __init__(
        self, nodes: NodeMap, node: int, store: Store, links: NodeLinks, watch: PeerWatch, timeout_s: float
    ) -> None:
        self._nodes = nodes
        self._node = node
        self._store = store
        self._links = links
        self._watch = watch
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s
        self._next_report = self._started + PROGRESS_INTERVAL_S

    def run(self, listener: socket.socket, own: NodeAddress) -> None:
        # Anyone can read PyTorch's stores; a reader of this half still lacks the other, if the job has a secret.
        secret = job_secret().prove(b"node links", self._await_key("node secret", 0))
        doorman = _Doorman(listener, self._node, secret)
        addresses: dict[int, NodeAddress] = {}
        try:
            for node in range(self._nodes.num_nodes):
                if node == self._node:
                    continue
                address = NodeAddress(**json.loads(self._await_key(f"node/{node}", node)))
                addresses[node] = address
                self._check_reachable(node, address)
                self._check_compression(node, address, own)
                for connection in range(max(own.num_devices, address.num_devices)):
                    if node < self._node:
                        self._links.add(node, connection, self._call(node, connection, address, secret))
                    else:
                        self._await_call(node, connection, doorman)
        finally:
            doorman.close()
        self._links.keep(self._node, secret, addresses)

    def _check_reachable(self, node: int, address: NodeAddress) -> None:
        if is_loopback(address.host) and self._nodes.boots[node] != self._nodes.boots[self._node]:
            raise RendezvousError(
                f"{self._nodes.describe(node)} listens on {address.host}, which no other machine can reach. "
                "Set MASTER_ADDR to an address of worker 0's machine other than a loopback address, or "
                "COARSE_NODE_ADDRESS on each machine."
            )

    def _check_compression(self, node: int, address: NodeAddress, own: NodeAddress) -> None:
        if address.compression != own.compression:
            raise RendezvousError(
                f"COARSE_NODE_COMPRESSION is {own.compression} on {self._nodes.describe(self._node)}, but "
                f"{address.compression} on {self._nodes.describe(node)}; set it alike on all nodes"
            )

    def _await_key(self, key: str, node: int) -> bytes:
        while True:
            try:
                return self._watch.get(self._store, key, _LOOK_INTERVAL_S)
            except TimeoutError:
                self._look_around(node, "to publish its address")

    def _call(self, node: int, connection: int, address: NodeAddress, secret: bytes) -> socket.socket:
        hello = (_MAGIC, self._node, node, connection)
        while True:
            try:
                return _call(address, hello, secret)
            except (OSError, _StrangerError) as error:
                self._look_around(node, f"to answer at {address.host} port {address.port} ({error})")
                time.sleep(_RETRY_INTERVAL_S)

    def _await_call(self, node: int, connection: int, doorman: _Doorman) -> None:
        while not self._links.has(node, connection):
            self._check_addresses(doorman)
            try:
                caller, number, link = doorman.visitors.get(timeout=_LOOK_INTERVAL_S)
            except queue.Empty:
                self._look_around(node, "to connect")
            else:
                self._links.add(caller, number, link)

    def _check_addresses(self, doorman: _Doorman) -> None:
        if (found := doorman.translated) is not None:
            raise RendezvousError(
                f"addresses are translated (NAT) between {self._nodes.describe(found.caller)} and "
                f"{self._nodes.describe(self._node)}: {found}. Nodes must reach each other at their own addresses: "
                "let containers use the network of their host, or connect the networks by routes or a VPN."
            )

    def _look_around(self, node: int, what: str) -> None:
        self._watch.check()
        now = time.monotonic()
        waiting = f"node {self._node} waits for {self._nodes.describe(node)} {what}"
        if now > self._deadline:
            raise RendezvousError(
                f"{waiting}: it has not answered within {self._deadline - self._started:.1f} s (COARSE_TIMEOUT_S). "
                "Look at the output of its workers. It may be stopped, or a firewall may drop the messages "
                "(COARSE_NODE_PORTS limits the ports), a router may translate addresses (NAT), or "
                "COARSE_NODE_ADDRESS may need another interface."
            )
        if now > self._next_report:
            self._next_report = now + PROGRESS_INTERVAL_S
            logger.warning("%.0f s: %s", now - self._started, waiting)


class _Doorman:
    """Accepts connections that prove to belong to the job; each has its own thread, so that none delays another.

    Args:
        listener: Listening socket; the caller closes it.
        node: Number of this node.
        secret: Secret of the node links.
        accepts_probes: Whether callers may leave without a word.
    """

    def __init__(
        self, listener: socket.socket, node: int, secret: bytes, *, accepts_probes: bool = False
    ) -> None:
        self.visitors: queue.Queue[tuple[int, int, socket.socket]] = queue.Queue()
        self.translated: _TranslatedError | None = None
        """Why a node of the job was turned away, if one was."""
        self._listener = listener
        self._node = node
        self._secret = secret
        self._accepts_probes = accepts_probes
        self._slots = threading.Semaphore(_MOST_HANDSHAKES)
        self._lock = threading.Lock()
        self._in_handshake: set[socket.socket] = set()
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._start(self._serve)

    def close(self) -> None:
        """Rejects all connections that have not completed the handshake. Idempotent."""
        with self._lock:
            self._is_closed = True
            for link in self._in_handshake:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        for thread in self._threads:
            thread.join()
        while not self.visitors.empty():
            self.visitors.get()[2].close()

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name="coarse-node-links", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while True:
            self._slots.acquire()
            try:
                link, address = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._is_closed:
                    link.close()
                    return
                self._in_handshake.add(link)
            self._start(lambda link=link, address=address: self._receive(link, address))  # type: ignore[misc]

    def _receive(self, link: socket.socket, address: object) -> None:
        try:
            link.settimeout(_HANDSHAKE_TIMEOUT_S)
            node, connection = _answer(link, self._node, self._secret)
        except (OSError, _StrangerError) as error:
            is_probe = self._accepts_probes and isinstance(error, _NothingSaidError)
            if not self._is_closed and not is_probe:
                logger.warning("refused a connection from %s: %s", address, error)
            self._forget(link)
            link.close()
        except _TranslatedError as error:
            self.translated = error
            self._forget(link)
            link.close()
        else:
            self._forget(link)
            self.visitors.put((node, connection, link))
        finally:
            self._slots.release()

    def _forget(self, link: socket.socket) -> None:
        with self._lock:
            self._in_handshake.discard(link)


# ---- the handshake ----


def _call(address: NodeAddress, hello: tuple[bytes, int, int, int], secret: bytes) -> socket.socket:
    link = socket.create_connection((address.host, address.port), timeout=_HANDSHAKE_TIMEOUT_S)
    try:
        greeting = _HELLO.pack(*hello, secrets.token_bytes(_NONCE_BYTES))
        link.sendall(greeting)
        nonce = _receive_exactly(link, _NONCE_BYTES)
        _check(_receive_exactly(link, _PROOF_BYTES), secret, b"listener", greeting + nonce)
        link.sendall(_prove(secret, b"caller", greeting + nonce) + ends_of(link))
        if _receive_exactly(link, len(_WELCOME)) != _WELCOME:
            raise _StrangerError("it answers with another protocol")
    except BaseException:
        close_abruptly(link)  # it may have been accepted
        raise
    return link


def _answer(link: socket.socket, own_node: int, secret: bytes) -> tuple[int, int]:
    greeting = _receive_exactly(link, _HELLO.size)
    magic, caller, node, connection, _ = _HELLO.unpack(greeting)
    if magic != _MAGIC:
        raise _StrangerError("it speaks another protocol")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    link.sendall(nonce + _prove(secret, b"listener", greeting + nonce))
    _check(_receive_exactly(link, _PROOF_BYTES), secret, b"caller", greeting + nonce)
    if node != own_node:
        raise _StrangerError(f"it wanted node {node}")
    if how := translation(link, _receive_exactly(link, ENDS_BYTES)):
        raise _TranslatedError(caller, how)
    link.sendall(_WELCOME)
    return caller, connection


def _prove(secret: bytes, role: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, role + b"|" + challenge, "sha256")


def _check(proof: bytes, secret: bytes, role: bytes, challenge: bytes) -> None:
    if not hmac.compare_digest(proof, _prove(secret, role, challenge)):
        raise _StrangerError("it does not have the secret of this job")


def _receive_exactly(link: socket.socket, num_bytes: int) -> bytes:
    deadline = time.monotonic() + _HANDSHAKE_TIMEOUT_S
    received = bytearray()
    while len(received) < num_bytes:
        link.settimeout(max(0.001, deadline - time.monotonic()))
        part = link.recv(num_bytes - len(received))
        if not part:
            kind = _StrangerError if received else _NothingSaidError
            raise kind("it closed the connection before it was accepted")
        received += part
    return bytes(received)


# ---- connections in place of those that broke ----


class Doorkeeper:
    """Listens at the held port of a process, and accepts callers that prove to belong to the job.

    Args:
        plan: The connections of this process.

    Raises:
        OSError: If it cannot listen.
    """

    def __init__(self, plan: ReconnectionPlan) -> None:
        with socket.socket(fileno=os.dup(plan.held_fd)) as holder:
            host, port, *_ = holder.getsockname()
            self._listener = socket.create_server((host, port), family=holder.family, backlog=_BACKLOG)
        self._doorman = _Doorman(self._listener, plan.node, bytes.fromhex(plan.secret), accepts_probes=True)
        self.is_closed = False

    @property
    def visitors(self) -> queue.Queue[tuple[int, int, socket.socket]]:
        """Accepted callers: the node, the number of the connection, the connection."""
        return self._doorman.visitors

    def close(self) -> None:
        """Stops listening. Idempotent."""
        self.is_closed = True
        self._doorman.close()
        self._listener.close()


def call_again(connection: NodeConnection, plan: ReconnectionPlan) -> socket.socket:
    """Connects to the process at the other end of a connection that broke; both prove to belong to the job.

    Raises:
        OSError: If it does not answer, or is a stranger; ConnectionRefusedError if nobody listens.
    """
    address = NodeAddress(host=connection.host, port=connection.port, num_devices=0, device_ports=())
    hello = (_MAGIC, plan.node, connection.node, connection.connection)
    try:
        link = _call(address, hello, bytes.fromhex(plan.secret))
    except _StrangerError as error:
        raise ConnectionError(str(error)) from error
    link.settimeout(None)
    return link


def check_is_served(connection: NodeConnection) -> None:
    """Checks that the process at the other end listens; it accepts no caller for this.

    Raises:
        OSError: If it does not answer; ConnectionRefusedError if nobody listens.
    """
    socket.create_connection((connection.host, connection.port), timeout=_HANDSHAKE_TIMEOUT_S).close()


def close_abruptly(link: socket.socket) -> None:
    """Closes a connection so that the other end does not take it for the end of this process."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()

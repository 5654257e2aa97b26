"""A memory device: the process that owns an arena, serves workers' control requests and runs a proxy.

The control path (this module) is one thread that never blocks on a peer; the data path is native
(coarse/kernels/include/coarse/proxy.hpp) and does not pass through Python. Life of a device: it exchanges shared
memory with the other devices, lets workers in, serves registrations, and ends when the last worker has gone.
docs/design/control-protocol.md has the messages.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from coarse.env import SCHEDULING_CHOICES
from coarse.errors import ProtocolError
from coarse.kernels import _native
from coarse.machine.emulation import Emulation
from coarse.proxy.job import DOORBELLS, EXCHANGE_LOGS, LINK_TABLE, RING_LOGS, DeviceJob
from coarse.proxy.memory import DeviceMemory, Segment, open_memory
from coarse.proxy.paced_links import PacedLinks, write_link_table
from coarse.proxy.protocol import Channel, Message, Received, int_field
from coarse.proxy.registrar import Registrar
from coarse.proxy.storage_service import StorageService

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_AFTER_A_LOSS = (
    "Gradients of this step are lost, parameters are those of the step before. Start the job again from your last "
    "checkpoint."
)
_MOST_ABORT_CHARACTERS = 4000  # of what other nodes are told; a frame between nodes has its limit


class _Worker:
    """A connection that may become a worker's: it has to say hello first."""

    def __init__(self, channel: Channel, pid: int) -> None:
        self.channel = channel
        self.pid = pid
        self.client = -1
        self.pidfd = -1
        self.has_left = False

    def close(self) -> None:
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class MemoryDevice:
    """Runs one memory device until its job is over.

    Args:
        job: This device's place in the session; its descriptors now belong to the device.
        memory: Where the bytes lie.
    """

    def __init__(self, job: DeviceJob, memory: DeviceMemory | None = None) -> None:
        self._job = job
        self._memory = memory or open_memory(job.kind)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(fileno=job.listen_fd)
        self._listener.setblocking(False)
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._peers: dict[int, Channel] = {}
        self._link_fds = [fd for fds in job.link_fds for fd in fds]
        self._connections: list[_Worker] = []
        self._workers: dict[int, _Worker] = {}
        self._client_segments: dict[int, Segment] = {}
        self._shared: dict[str, Segment] = {}  # what all devices map, by name
        self._proxy: _native.Proxy | None = None
        self._links: PacedLinks | None = None  # in an emulated session
        self._is_welcoming = False
        self._registrar = Registrar(job, self._memory, self._send_to_client, self._send_to_peers)
        self._storage = StorageService(self._memory, self._send_to_client)
        self._is_aborted = False
        self._left_elsewhere: set[int] = set()  # ranks of other nodes
        self._ended_at: dict[
            int, set[int]
        ] = {}  # devices of this node that have seen the end of another node's
        self._deadline = time.monotonic() + job.join_timeout_s

    # ---- life ----

    def run(self) -> None:
        """Serves until every worker has left or died, or the session never came about."""
        self._watch(self._listener.fileno(), self._accept)
        self._watch(self._event_fd, self._take_proxy_events)
        self._watch_leader()
        try:
            self._open_peers()
            while not self._is_over():
                for key, _ in self._selector.select(_TICK_S):
                    key.data()
                self._progress()
        finally:
            self._close()

    def _is_over(self) -> bool:
        has_everyone_left = all(worker.has_left for worker in self._workers.values())
        if len(self._workers) == self._job.num_clients or self._is_aborted:
            return has_everyone_left
        return time.monotonic() > self._deadline

    def _close(self) -> None:
        if self._proxy is not None:
            self._proxy.stop()
        if not self._is_welcoming:
            self._remove_directory()
        self._close_links()
        self._storage.close()
        for worker in self._connections:
            worker.close()
        for channel in self._peers.values():
            channel.close()
        self._listener.close()
        self._selector.close()
        os.close(self._event_fd)

    def _remove_directory(self) -> None:
        """Does the leader's duty in a session that never came about: it may have been killed."""
        from coarse.proxy.launch import TOKEN_FILE

        socket_path = Path(self._listener.getsockname())
        socket_path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            # Fails while other devices still have their sockets there; the last one succeeds.
            if [path.name for path in socket_path.parent.iterdir()] == [TOKEN_FILE]:
                (socket_path.parent / TOKEN_FILE).unlink()
            socket_path.parent.rmdir()

    def _watch(self, fd: int, callback: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _watch_leader(self) -> None:
        try:
            pidfd = os.pidfd_open(self._job.leader_pid)
        except OSError:
            self._deadline = 0.0
            return

        def leader_died() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            # If it was let in as a worker, its own pidfd tells; if not, nobody will ever come.
            self._deadline = 0.0

        self._watch(pidfd, leader_died)

    # ---- the other devices ----

    def _open_peers(self) -> None:
        self._shared = {
            name: self._memory.allocate(name, num_bytes) for name, num_bytes in self._job.own_memory().items()
        }
        if LINK_TABLE in self._shared:
            write_link_table(self._shared[LINK_TABLE].fd, Emulation.from_json(self._job.emulation))
        own = list(self._shared)
        for device, fd in enumerate(self._job.peer_fds):
            if device == self._job.device:
                continue
            channel = Channel(socket.socket(fileno=fd))
            channel.socket.setblocking(False)
            self._peers[device] = channel
            self._watch(fd, lambda device=device: self._read_peer(device))  # type: ignore[misc]
        self._send_to_peers({"type": "memory", "names": own}, [self._shared[name].fd for name in own])

    def _read_peer(self, device: int) -> None:
        channel = self._peers[device]
        try:
            received = channel.receive()
        except BlockingIOError:
            return
        except (EOFError, OSError, ProtocolError):
            self._selector.unregister(channel.fileno())
            self._abort(
                "MemoryDeviceLostError",
                f"memory device md{device}{self._of_this_node()} died. {_AFTER_A_LOSS}",
            )
            return
        if received is not None:
            self._handle_peer(device, received)

    def _handle_peer(self, device: int, received: Received) -> None:
        fds, received.fds = received.fds, []
        segments = [Segment(fd, _native.sealed_bytes(fd)) for fd in fds]
        message = received.message
        if received.kind == "memory":
            self._shared.update(zip(message["names"], segments, strict=True))
        elif received.kind == "client":
            self._client_segments[int_field(message, "client")] = segments[0]
        elif received.kind == "abort":
            is_elsewhere = message["is_elsewhere"] is True
            self._abort(str(message["error"]), str(message["text"]), is_elsewhere=is_elsewhere)
        elif received.kind == "node_ended":
            self._node_ended(int_field(message, "node"), device)
        elif received.kind == "segments":
            self._registrar.take_peer_memory(message, segments)

    # ---- workers ----

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid != os.geteuid():
            logger.warning("[md%s] refused a connection of user %s", self._job.device, uid)
            connection.close()
            return
        connection.setblocking(False)
        worker = _Worker(Channel(connection), pid)
        self._connections.append(worker)
        self._watch(connection.fileno(), lambda: self._read_worker(worker))

    def _read_worker(self, worker: _Worker) -> bool:
        """Serves the next frame of a worker; False if there is none."""
        try:
            received = worker.channel.receive()
            if received is not None:
                try:
                    self._handle_worker(worker, received)
                finally:
                    received.close()
        except BlockingIOError:
            return False
        except (EOFError, OSError):
            self._lose(worker)
            return False
        except ProtocolError as error:
            if worker.client >= 0:
                self._evict(worker, f"broke the control protocol: {error}")
            else:
                logger.warning(
                    "[md%s] dropped a connection of process %s: %s", self._job.device, worker.pid, error
                )
                self._lose(worker)
        return True

    def _bury(self, worker: _Worker) -> None:
        """Hears out what a process said before it ended: it may have been goodbye."""
        while not worker.has_left and self._read_worker(worker):
            pass
        self._lose(worker)

    def _handle_worker(self, worker: _Worker, received: Received) -> None:
        message = received.message
        if worker.client < 0:
            if received.kind != "hello":
                raise ProtocolError(f"{received.kind!r} came before hello")
            self._admit(worker, message)
        elif received.kind == "register":
            self._registrar.register(worker.client, message)
            if any(other.has_left for other in self._workers.values()):
                self._abort("WorkerLostError", self._departure())
        elif received.kind == "unregister":
            self._registrar.unregister(worker.client, message, self._proxy)
        elif received.kind == "reserve":
            self._storage.reserve(worker.client, message)
        elif received.kind == "commit":
            self._storage.commit(worker.client, message)
        elif received.kind == "lookup":
            self._storage.look_up(worker.client, message)
        elif received.kind == "departures":
            self._send(worker, {"type": "departures", "ranks": sorted(self._left_elsewhere)})
        elif received.kind == "set_bandwidth" and self._links is not None:
            self._send(worker, self._links.set_bandwidth(message))
        elif received.kind == "transfers" and self._links is not None:
            log_fd = self._shared[LINK_TABLE].read_only_fd()
            self._send(worker, {"type": "transfers"}, [log_fd])
            os.close(log_fd)
        elif received.kind == "pacing" and self._links is not None:
            self._send(worker, self._links.report())
        elif received.kind == "bye":
            self._leave(worker)
        else:
            raise ProtocolError(f"there is no message {received.kind!r}")

    def _admit(self, worker: _Worker, message: Message) -> None:
        token = message.get("token")
        if not isinstance(token, str) or not hmac.compare_digest(_bytes(token), _bytes(self._job.token)):
            raise ProtocolError("hello with a wrong token")
        client = int_field(message, "client", high=self._job.num_clients - 1)
        if client in self._workers:
            raise ProtocolError(f"worker {self._job.rank(client)} is here already")
        worker.client = client
        self._workers[client] = worker
        self._watch_worker(worker)
        if client in self._job.local_clients:
            segment = self._memory.allocate("client", _native.client_segment_bytes(self._job.num_devices))
            self._client_segments[client] = segment
            self._send_to_peers({"type": "client", "client": client}, [segment.fd])

    def _watch_worker(self, worker: _Worker) -> None:
        # A forked child of the worker keeps the socket open, so its closing alone would not tell of the death.
        with contextlib.suppress(OSError):
            worker.pidfd = os.pidfd_open(worker.pid)
            self._watch(worker.pidfd, lambda: self._bury(worker))

    def _unwatch(self, worker: _Worker) -> None:
        for fd in (worker.channel.fileno(), worker.pidfd):
            if fd >= 0:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(fd)

    def _leave(self, worker: _Worker) -> None:
        worker.has_left = True
        self._unwatch(worker)
        if self._proxy is not None:
            self._proxy.client_left(worker.client)
        if self._registrar.is_waiting_for(worker.client):
            self._abort("WorkerLostError", self._departure())
        if not self._is_over():
            # At the end of everything memory goes with the process, and sync cores may still be at work.
            self._registrar.release_all(worker.client, self._proxy)
        self._storage.forget(worker.client)
        worker.close()

    def _lose(self, worker: _Worker) -> None:
        if worker.has_left:
            return
        if worker.client < 0:
            self._unwatch(worker)
            self._connections.remove(worker)
            worker.close()
            return
        step = self._proxy.last_step(worker.client) if self._proxy is not None and self._is_welcoming else 0
        self._abort(
            "WorkerLostError",
            f"worker {self._job.rank(worker.client)} (pid {worker.pid}) died; its last contribution was step {step}. "
            "Parameters are those of the last step that every worker finished. Start the job again from there.",
        )
        self._leave(worker)

    def _evict(self, worker: _Worker, reason: str) -> None:
        """Ends the session because of what `worker` sent."""
        text = f"worker {self._job.rank(worker.client)} (pid {worker.pid}) was evicted because it {reason}"
        logger.warning("[md%s] %s", self._job.device, text)
        self._abort("WorkerLostError", f"{text}. Start the job again from your last checkpoint.")
        self._leave(worker)

    def _abort(self, error: str, text: str, *, is_elsewhere: bool = False) -> None:
        """Tells every worker once that nothing will complete any more; each through its local device.

        Args:
            error, text: The error that workers raise.
            is_elsewhere: Whether it is the loss of something on another node.
        """
        if self._is_aborted:
            return
        self._is_aborted = True
        loss = {"error": error, "text": text, "is_elsewhere": is_elsewhere}
        self._send_to_peers({"type": "abort", **loss}, ())
        if self._proxy is not None:
            self._proxy.abort_nodes(json.dumps({"error": error, "text": text[:_MOST_ABORT_CHARACTERS]}))
        for client in self._job.local_clients:
            worker = self._workers.get(client)
            if worker is None or worker.has_left:
                continue
            self._send(worker, {"type": "aborted", **loss})
            if self._is_welcoming and self._proxy is not None:
                self._proxy.abort_client(client)

    def _send(self, worker: _Worker, message: Message, fds: Sequence[int] = ()) -> None:
        # A worker that is gone is noticed by its pidfd; one that reads nothing gets what fits the socket.
        with contextlib.suppress(OSError):
            worker.channel.send(message, fds)

    def _send_to_client(self, client: int, message: Message, fds: Sequence[int]) -> None:
        self._send(self._workers[client], message, fds)

    def _send_to_peers(self, message: Message, fds: Sequence[int]) -> None:
        # A peer that is gone is noticed by its socket.
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(message, fds)

    # ---- what the data path reports ----

    def _take_proxy_events(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        assert self._proxy is not None
        for kind, node, rank, reason in self._proxy.take_node_events():
            self._take_node_event(kind, node, rank, reason.decode(errors="replace"))
        for client, text in self._proxy.take_events():
            if text and client >= 0:
                if not self._workers[client].has_left:
                    self._evict(self._workers[client], text)
            elif text:
                self._abort("SchemaMismatchError", text)
            else:
                self._abort("WorkerLostError", self._departure())

    def _take_node_event(self, kind: _native.NodeEventKind, node: int, rank: int, text: str) -> None:
        assert self._proxy is not None
        if kind == _native.NodeEventKind.LEFT:
            self._left_elsewhere.add(rank)
            self._proxy.worker_left_node(node)
        elif kind == _native.NodeEventKind.ABORTED:
            self._abort(*_read_loss(text), is_elsewhere=True)
        elif kind == _native.NodeEventKind.LOST:
            ranks = ", ".join(map(str, self._job.nodes[node]))
            self._abort(
                "MemoryDeviceLostError",
                f"a memory device of node {node} (worker(s) {ranks}), or the connection to it, is lost: {text}. "
                f"{_AFTER_A_LOSS}",
                is_elsewhere=True,
            )
        else:
            self._send_to_peers({"type": "node_ended", "node": node}, ())
            self._node_ended(node, self._job.device)

    def _node_ended(self, node: int, device: int) -> None:
        """Once all devices of this node have seen the end of another one's, nothing of it is on its way any more."""
        seen = self._ended_at.setdefault(node, set())
        seen.add(device)
        if len(seen) == self._job.num_devices and self._proxy is not None:
            self._proxy.node_ended(node)

    def _of_this_node(self) -> str:
        return f" of node {self._job.node}" if self._job.num_nodes > 1 else ""

    def _departure(self) -> str:
        here = {self._job.rank(client) for client, worker in self._workers.items() if worker.has_left}
        left = sorted(here | self._left_elsewhere)
        return (
            f"worker(s) {', '.join(map(str, left))} closed the session while others still synchronise. "
            "Give every worker the same number of steps, or train inside model.join()."
        )

    # ---- coming together ----

    def _progress(self) -> None:
        """Takes every step that has become possible."""
        if self._proxy is None and self._has_all_shared_memory():
            self._proxy = self._make_proxy()
        is_everyone_here = len(self._client_segments) == self._job.num_clients == len(self._workers)
        if self._proxy is not None and is_everyone_here and not self._is_welcoming:
            self._welcome(self._proxy)
        if self._proxy is not None and self._is_welcoming:
            self._registrar.advance(self._proxy)

    def _has_all_shared_memory(self) -> bool:
        return self._shared.keys() >= self._job.shared_memory()

    def _make_proxy(self) -> _native.Proxy:
        rings = self._job.ring_names()
        proxy = _native.Proxy(
            device=self._job.device,
            num_devices=self._job.num_devices,
            num_clients=self._job.num_clients,
            num_sync_cores=self._job.num_sync_cores,
            scheduling=SCHEDULING_CHOICES.index(self._job.scheduling),
            local_clients=list(self._job.local_clients),
            spin_us=self._job.spin_us,
            doorbells_fd=self._shared[DOORBELLS].fd,
            ring_logs_fd=self._shared[RING_LOGS].fd if rings else -1,
            ring_fds=[self._shared[name].fd for name in rings],
            event_fd=self._event_fd,
            exchange_logs_fd=self._shared[EXCHANGE_LOGS].fd if self._job.has_exchange else -1,
            link_table_fd=self._shared[LINK_TABLE].fd if self._job.emulation else -1,
        )
        if self._job.emulation:
            self._links = PacedLinks(self._shared[LINK_TABLE].fd)
        if self._job.num_nodes > 1:
            proxy.join_nodes(self._job.node, self._job.nodes, self._job.link_fds)
            self._close_links()
        return proxy

    def _close_links(self) -> None:
        """Gives up this process's own ends of the connections to other nodes, of which the proxy has duplicates."""
        links, self._link_fds = self._link_fds, []
        for fd in links:
            os.close(fd)

    def _welcome(self, proxy: _native.Proxy) -> None:
        """All workers are here: the data path starts, and they are told."""
        for client, segment in self._client_segments.items():
            proxy.add_client(client, segment.fd)
        proxy.start()
        self._is_welcoming = True
        for client, worker in self._workers.items():
            is_local = client in self._job.local_clients
            fds = [self._client_segments[client].fd, self._shared[DOORBELLS].fd] if is_local else []
            self._send(worker, {"type": "welcome", "device": self._job.device, "pid": os.getpid()}, fds)
        for segment in self._client_segments.values():
            segment.close()


def _read_loss(text: str) -> tuple[str, str]:
    try:
        loss = json.loads(text)
        return str(loss["error"]), str(loss["text"])
    except (ValueError, TypeError, KeyError):
        return "WorkerLostError", f"another node ended the session: {text}"


def _bytes(token: str) -> bytes:
    # JSON can carry halves of surrogate pairs, which are no characters.
    return token.encode("utf-8", "surrogatepass")


def run_device(job_fd: int) -> None:
    """Entry point of a memory device process that a session started.

    Args:
        job_fd: An inherited descriptor from which the DeviceJob is read.
    """
    MemoryDevice(DeviceJob.read(job_fd)).run()

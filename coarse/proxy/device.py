"""A memory device: the process that owns an arena, serves workers' control requests and runs a proxy.

The control path is one thread that never blocks on a peer. The data path is native
(coarse/kernels/include/coarse/device/proxy.hpp) and does not use Python. A device exchanges shared memory with the
other devices, admits workers, serves registrations, and ends when the last worker has left.
docs/design/control-protocol.md describes the messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from coarse.errors import CoarseError, ProtocolError
from coarse.kernels import _native
from coarse.machine.out_of_memory import OutOfMemoryWatch
from coarse.metrics.declarations import device_label
from coarse.proxy.data_path import DataPath
from coarse.proxy.device_status import DeviceStatus
from coarse.proxy.event_loop import EventLoop
from coarse.proxy.mailbox import Mailbox
from coarse.proxy.membership import DRAINED, Membership
from coarse.proxy.memory import DeviceMemories
from coarse.proxy.memory.values import value_memory
from coarse.proxy.nodes.other_nodes import OtherNodes, Reconnect
from coarse.proxy.nodes.peers import ENDED, STOPPED, Peers
from coarse.proxy.recovery.persistent_groups import DeviceContents
from coarse.proxy.recovery.replication import REFILL_GROUP, REFILL_VALUE, Replication
from coarse.proxy.registrar import Registrar
from coarse.proxy.snapshots.snapshot_service import SnapshotService
from coarse.proxy.storage_service import StorageService
from coarse.proxy.workers import WorkerConnection, WorkerConnections
from coarse.wire.device_job import HOME_DEVICE, DeviceJob
from coarse.wire.failure_messages import (
    LEFT,
    Failure,
    WorkerLoss,
    device_died,
    device_failed,
    device_silent,
    device_unready,
    node_of_worker_lost,
    node_without_workers,
    too_few_workers,
    training_over,
    worker_died,
    worker_evicted,
    workers_departed,
)
from coarse.wire.messages import Message, Received, int_field
from coarse.wire.persistent_sessions import leave_session_directory
from coarse.wire.segments import Segment, pack, unpack

if TYPE_CHECKING:  # slow to import
    from coarse.metrics.endpoint import MetricsEndpoint

logger = logging.getLogger(__name__)

_TICK_S = 0.5

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTIFYING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

# Errors by the label of coarse_failures_total.
_FAILURE_KINDS = {
    "WorkerLostError": "worker_lost",
    "MemoryDeviceLostError": "device_lost",
    "SchemaMismatchError": "mismatch",
}

REASONS = (CoarseError, ValueError, OSError, _native.CudaError, _native.NcclError)
"""Errors that a device reports to its workers if it cannot start: faults of the machine, not its own bugs."""


class MemoryDevice:
    """Runs one memory device until its job, or an attempt at it, is over.

    Args:
        job: This device's place in the session; the device takes ownership of its descriptors.
        memories: The memories that it uses; the caller closes them.
        contents: Contents from earlier attempts, and for later ones.
        status: Answers `coarse status` about this device.
        reconnect: Makes what replaces broken connections to other nodes.
    """

    def __init__(
        self,
        job: DeviceJob,
        memories: DeviceMemories,
        contents: DeviceContents,
        status: DeviceStatus,
        reconnect: Reconnect,
    ) -> None:
        self._job = job
        self._contents = contents
        self._status = status
        self._loop = EventLoop()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop.watch(self._event_fd, self._take_proxy_events)
        self._workers = WorkerConnections(job, self._loop, self)
        self._peers = Peers(job, self._loop, on_message=self._hear_peer, on_lost=self._lose_peer)
        self._mailbox = Mailbox(self._loop)
        self._data_path = DataPath(
            job, memories.own, self._event_fd, look_again=lambda: self._mailbox.post(self._progress)
        )
        self._snapshots = SnapshotService(job, memories.own, self._workers.send, self._mailbox.post)
        self._registrar = Registrar(
            job,
            memories,
            self._workers.send,
            self._peers.tell,
            self._snapshots,
            contents.groups,
            contents.replicas,
            self._data_path.member_since,
        )
        status.follow(self._registrar.reserved_bytes)
        self._storage = StorageService(value_memory(memories.own), self._workers.send, contents.storage)
        self._replication = Replication(job, memories, contents, self._peers.tell_one)
        self._has_shared = False
        self._endpoint: MetricsEndpoint | None = None
        self._has_told_of_nccl = False
        self._other_nodes = OtherNodes(
            job,
            self._peers.tell,
            self._peers.tell_one,
            self._abort,
            reconnect,
            self._lose_elsewhere,
            can_go_on=lambda: self._can_go_on,
            lose_workers=self._lose_node,
            proxy=self._started_proxy,
        )
        self.lost: set[int] = set()
        """Other devices that have ended; set by run()."""
        self.replaced: dict[int, int] = {}
        """Devices that have replaced lost ones, each with a socket for the caller of run()."""
        self._loss: Failure | None = None
        self._memory_watch = OutOfMemoryWatch()
        self._goes_on = False
        self._failed_ranks: set[int] = set()  # workers that have left early
        self._membership = Membership(job)
        self._is_dismissed = False
        self._deadline = time.monotonic() + (job.join_timeout_s if job.leader_pid else job.keep_s)
        self._answers: dict[str, Callable[[WorkerConnection, Message], None]] = {
            "register": self._register,
            "unregister": self._unregister,
            "reserve": lambda worker, message: self._storage.reserve(worker.client, message),
            "commit": lambda worker, message: self._storage.commit(worker.client, message),
            "lookup": lambda worker, message: self._storage.look_up(worker.client, message),
            "snapshot_storage": lambda worker, message: self._storage.take_snapshot(worker.client, message),
            "release_storage": lambda worker, message: self._storage.release_snapshot(worker.client, message),
            "release_snapshot": lambda worker, message: self._snapshots.release(message),
            "read_snapshot": lambda worker, message: self._snapshots.read(worker.client, message),
            "warm_snapshots": lambda _, message: self._warm_snapshots(message),
            "keep_snapshots": lambda worker, message: self._snapshots.keep(worker.client, message),
            "snapshot_statistics": lambda worker, message: self._snapshots.report(worker.client, message),
            "departures": self._tell_departures,
            "late_workers": self._tell_late_workers,
            "lost": self._hear_of_loss,
            "ready": self._await_membership,
            "entered": lambda worker, _: self._membership.enter(worker.client),
            "bye": self._say_goodbye,
        }
        if job.emulation:
            self._answers["set_bandwidth"] = self._set_bandwidth
            self._answers["transfers"] = self._send_transfers
            self._answers["pacing"] = self._report_pacing

    # ---- life ----

    def run(self) -> bool:
        """Serves until every worker has left or died, or until the session fails to begin.

        Returns:
            Whether to keep the contents for the workers of another attempt: workers were lost, and the contents are
            consistent.
        """
        try:
            self._begin()
            try:
                self._serve()
            except REASONS as error:
                if self._data_path.is_started:
                    raise
                self._turn_away(error)
            if self._is_to_be_continued():
                self._goes_on = self._settle()
            elif self._workers.is_complete and not self._is_aborted:
                self._peers.tell({"type": ENDED})
            return self._goes_on
        finally:
            self._close()

    def refuse(self, reason: Exception) -> None:
        """Reports to every worker why this device cannot serve it; call it instead of run()."""
        try:
            self._begin()
            self._turn_away(reason)
        finally:
            self._close()

    def _begin(self) -> None:
        self._leave_signals_to_workers()
        self._watch_leader()

    def _serve(self) -> None:
        self._share()
        while not self._is_over():
            self._loop.run_once(_TICK_S)
            self._workers.drop_silent()
            self._snapshots.look(self._data_path.metrics)
            self._progress()
            self._gauge()

    def _gauge(self) -> None:
        """Renews the metrics that say how things stand now."""
        metrics = self._data_path.metrics
        metrics.set("coarse_workers", len(self._workers.present(range(self._job.num_clients))))
        metrics.set("coarse_memory_bytes", self._registrar.allocated_bytes)
        for kind, count in self._contents.failures.items():
            metrics.set("coarse_failures_total", count, label=kind)

    def _turn_away(self, reason: Exception) -> None:
        loss = device_unready(self._job, reason)
        logger.error("%s", loss.text)
        self._abort(loss)
        while not self._is_over():
            self._loop.run_once(_TICK_S)
            self._workers.drop_silent()

    @property
    def _is_aborted(self) -> bool:
        return self._loss is not None

    @property
    def _is_unready(self) -> bool:
        """Whether the session cannot begin; workers receive the reason as they join."""
        return self._loss is not None and self._loss.is_unready

    def _is_over(self) -> bool:
        if self._workers.is_complete or (self._is_aborted and not self._is_unready):
            return self._workers.have_all_left
        return time.monotonic() > self._deadline

    def _progress(self) -> None:
        """Performs every start-up action that has become possible, unless the session cannot begin."""
        if self._is_unready:
            return
        self._share()
        self._data_path.open()
        self._tell_of_nccl()
        if self._data_path.is_ready and self._workers.is_complete and not self._data_path.is_started:
            self._welcome()
        if (proxy := self._data_path.running_proxy) is not None:
            self._settle_newcomers()
            self._registrar.advance(proxy)
            if not self._is_aborted and (silent := self._data_path.silent_device()) is not None:
                self._abort(device_silent(self._job, silent))

    def _share(self) -> None:
        """Allocates memory that all devices map, and informs the others, when all exist. Idempotent."""
        if self._peers.is_complete and not self._has_shared:
            self._has_shared = True
            self._shared_memory = self._data_path.share()
            if self._job.is_home:
                self._status.serve_metrics(self._data_path.metrics_reader().read)
            self._tell_of_nccl()  # before they see the communicator's name
            self._peers.tell(*self._shared_message())
            for client in self._job.local_clients:
                if client in self._job.vacant:
                    self._allocate_client(client)
            self._serve_metrics()

    def _serve_metrics(self) -> None:
        """Serves the metrics of the node, if this is its home device and the settings say so."""
        if self._job.is_home and self._job.metrics_port:
            from coarse.metrics.endpoint import try_endpoint  # slow to import

            read = self._data_path.metrics_reader().read
            address, port = self._job.metrics_address, self._job.metrics_port
            self._endpoint = try_endpoint(read, address, port, device_label(self._job.device))

    def _tell_of_nccl(self) -> None:
        """Informs the other devices if this one cannot join NCCL, so that none waits for it. Idempotent."""
        if self._data_path.nccl_problem and not self._has_told_of_nccl:
            self._has_told_of_nccl = True
            reason = self._data_path.nccl_problem
            logger.warning("[md%s] memory devices do not use NCCL: %s", self._job.device, reason)
            self._peers.tell({"type": "no_nccl", "reason": reason})

    def _shared_message(self) -> tuple[Message, list[int]]:
        extents, fds = pack(self._shared_memory.values())
        return {"type": "memory", "names": list(self._shared_memory), "extents": extents}, fds

    def _welcome(self) -> None:
        """Starts the data path when all workers have joined, and notifies them."""
        self._data_path.start()
        self._stand_in_for_vacant_places()
        for client in self._job.founders:
            self._workers.send(client, self._welcome_message(), self._welcome_fds(client))
        self._data_path.release_clients()

    def _stand_in_for_vacant_places(self) -> None:
        """Goes on without workers in vacant places, as if they had been lost before they did anything."""
        proxy = self._data_path.proxy
        assert proxy is not None
        for client in self._job.vacant:
            proxy.client_ended(client)
            self._registrar.lose(client, proxy)

    def _welcome_message(self) -> Message:
        return {
            "type": "welcome",
            "device": self._job.device,
            "pid": os.getpid(),
            "has_nccl": self._data_path.has_nccl,
        }

    def _welcome_fds(self, client: int) -> list[int]:
        return self._data_path.worker_fds(client) if client in self._job.local_clients else []

    def _is_to_be_continued(self) -> bool:
        is_unfinished = self._is_aborted or bool(self._failed_ranks)
        is_given_up = self._is_dismissed or self._is_unready
        return bool(self._job.keep_s) and is_unfinished and not is_given_up

    def _settle(self) -> bool:
        """Brings the contents to one whole step after all workers have ended; returns whether that succeeded.

        The home device goes first, unless it is lost. No device sends or reads messages of the next attempt before
        all have stopped.
        """
        deadline_s = time.monotonic() + self._job.keep_s
        if not self._workers.await_ends(deadline_s):
            return False
        self._data_path.stop()
        self._peers.tell({"type": STOPPED})
        try:
            self.lost = self._peers.await_stop(deadline_s)
            waits_for_home = not self._job.is_home and HOME_DEVICE not in self.lost
            if waits_for_home and not self._peers.await_message(HOME_DEVICE, "kept", deadline_s):
                self.lost.add(HOME_DEVICE)
        except TimeoutError:
            return False
        if not self._replication.survives(self.lost):
            return False
        if self._data_path.proxy is not None:
            self._replication.finish(self._data_path.proxy, self.lost)
        if self._job.is_home:
            self._peers.tell({"type": "kept"})
        return True

    def _leave_signals_to_workers(self) -> None:
        """Lets workers react to signals first: a batch system signals all processes, and workers may still save."""
        for number in _ENDING_SIGNALS:
            signal.signal(number, lambda number, frame: self._be_told_to_end())
        for number in _NOTIFYING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _be_told_to_end(self) -> None:
        """Handles a request to end: ends with the workers, or at once while waiting for another attempt."""
        self._is_dismissed = True
        if self._workers.is_empty and not self._job.leader_pid:
            self._deadline = 0.0

    def _watch_leader(self) -> None:
        if not self._job.leader_pid:
            return
        try:
            pidfd = os.pidfd_open(self._job.leader_pid)
        except OSError:
            self._deadline = 0.0
            return

        def leader_died() -> None:
            self._loop.unwatch(pidfd)
            os.close(pidfd)
            # If it has joined as a worker, its own pidfd reports its death; if not, no worker will ever join.
            self._deadline = 0.0

        self._loop.watch(pidfd, leader_died)

    def _close(self) -> None:
        self._other_nodes.close()
        self._data_path.stop()
        if self._endpoint is not None:
            self._endpoint.close()
        self._data_path.close()
        # Before closing any connection: a process that waits for the close may start devices in the same place.
        if self._job.keep_s and not self._goes_on:
            leave_session_directory(self._workers.socket)
        elif self._job.replaces_workers or (not self._data_path.is_started and not self._goes_on):
            self._workers.socket.abandon()
        self._registrar.close()
        self._storage.close()
        self._snapshots.close()
        self._mailbox.close()
        self._workers.close()
        self._peers.close()
        self._loop.close()
        os.close(self._event_fd)

    # ---- the other devices ----

    def _hear_peer(self, device: int, received: Received) -> None:
        fds, received.fds = received.fds, []
        message = received.message
        segments = unpack(message.get("extents", [None] * len(fds)), fds)
        if received.kind == "memory":
            self._data_path.take_shared(dict(zip(message["names"], segments, strict=True)))
        elif received.kind == "no_nccl":
            self._data_path.nccl_problem = str(message["reason"])
            self._has_told_of_nccl = True
        elif received.kind == "client":
            self._take_client(
                int_field(message, "client", high=self._job.num_clients - 1), message, segments[0]
            )
        elif received.kind == "segments":
            self._registrar.take_peer_memory(message, segments)
        elif received.kind in (REFILL_GROUP, REFILL_VALUE):
            self._replication.take(message, segments)
            for segment in segments:
                segment.close()
        elif received.kind == DRAINED:
            client = int_field(message, "client", high=self._job.num_clients - 1)
            self._note_drained(client, int_field(message, "pid"), device)
        elif received.kind == "abort":
            self._abort(Failure.from_message(message))
        elif received.kind in self._other_nodes.kinds_of_losses:
            self._other_nodes.lost.hear_peer(device, message)
        elif received.kind == "node_ended":
            self._other_nodes.node_ended(int_field(message, "node"), device, self._data_path.proxy)

    def _lose_peer(self, device: int) -> None:
        self._abort(device_died(self._job, device))

    # ---- workers ----

    def worker_admitted(self, worker: WorkerConnection) -> None:
        """Allocates the worker's segment, if this is its own device."""
        if self._data_path.is_started:
            return self._admit_newcomer(worker)
        if not self._job.leader_pid:
            self._deadline = max(self._deadline, time.monotonic() + self._job.join_timeout_s)
        if self._loss is not None and self._loss.is_unready:
            worker.send(self._loss.to_message("aborted"))
        elif worker.client in self._job.local_clients:
            self._allocate_client(worker.client)

    def _allocate_client(self, client: int) -> None:
        fd = self._data_path.allocate_client(client)
        self._peers.tell({"type": "client", "client": client}, [fd])

    def worker_asked(self, worker: WorkerConnection, request: Received) -> None:
        """Answers a request.

        Raises:
            ProtocolError: If the request is unknown or cannot be served.
        """
        if request.kind == "write_snapshot":
            return self._snapshots.write(request)
        answer = self._answers.get(request.kind)
        if answer is None:
            raise ProtocolError(f"unknown message {request.kind!r}")
        answer(worker, request.message)

    def worker_misbehaved(self, worker: WorkerConnection, reason: str) -> None:
        """Ends the session because a worker sent invalid data."""
        loss = worker_evicted(self._job.rank(worker.client), worker.pid, reason)
        logger.warning("[md%s] %s", self._job.device, loss.text)
        self._abort(loss)
        self._leave(worker)

    def worker_died(self, worker: WorkerConnection) -> None:
        """Goes on without a worker that has died, or ends the session."""
        self._settle_newcomers()
        if worker.client in self._membership.newcomers:
            return self._lose_newcomer(worker)
        proxy = self._data_path.running_proxy
        last_step = proxy.last_step(worker.client) if proxy is not None else 0
        evidence = self._memory_watch.evidence()
        if self._can_go_on:
            return self._lose_member(worker, f"died{f' ({evidence})' if evidence else ''}")
        self._abort(worker_died(self._job.rank(worker.client), worker.pid, last_step, evidence))
        self._leave(worker)

    def dismissed(self) -> None:
        """Ends the device, if it only waits for another attempt."""
        if self._workers.is_empty:
            self._be_told_to_end()

    def device_replaced(self, device: int, fd: int) -> None:
        """Gives another device, which has replaced a lost one, the lost device's contents.

        Raises:
            ProtocolError: If workers have already joined.
        """
        if not self._workers.is_empty:
            os.close(fd)
            raise ProtocolError(f"memory device md{device} is replaced although workers have joined")
        if (before := self.replaced.pop(device, -1)) >= 0:
            os.close(before)
        self.replaced[device] = os.dup(fd)
        self._peers.replace(device, fd)
        self._replication.refill(device)
        if self._has_shared:
            self._peers.tell_one(device, *self._shared_message())

    def _hear_of_loss(self, worker: WorkerConnection, message: Message) -> None:
        device = int_field(message, "device", high=self._job.num_devices - 1)
        if device == self._job.device:
            raise ProtocolError("'lost' names the memory device that received it")
        lost = device_silent if message.get("is_silent") is True else device_died
        self._abort(lost(self._job, device))

    def _say_goodbye(self, worker: WorkerConnection, message: Message) -> None:
        self._settle_newcomers()
        if worker.client in self._membership.newcomers:
            return self._lose_newcomer(worker)
        if message.get("leaves_early") is True and self._can_go_on:
            return self._part_with(worker)
        if message.get("is_finished") is not True:
            self._failed_ranks.add(self._job.rank(worker.client))
            if self._can_go_on:
                return self._lose_member(worker, "left with an error of its own")
        self._leave(worker)

    # ---- lost workers, without which the others go on ----

    @property
    def _can_go_on(self) -> bool:
        return self._job.min_workers > 0 and self._data_path.is_started and not self._is_aborted

    def _lose_member(self, worker: WorkerConnection, fate: str) -> None:
        """Goes on without a worker when its process has ended, unless too few are left."""
        if not self._goes_on_without(worker, fate):
            return
        self._contents.failures["worker_lost"] += 1
        self._tell_who_goes_on(self._membership.losses[-1])
        self._workers.await_end(worker, lambda: self._bury_member(worker))

    def _part_with(self, worker: WorkerConnection) -> None:
        """Goes on without a worker that leaves as planned, at once: it has said that it pushes nothing more."""
        if self._goes_on_without(worker, LEFT):
            self._workers.forget(worker)
            self._bury_member(worker)

    def _goes_on_without(self, worker: WorkerConnection, fate: str) -> bool:
        """Notes the loss of a worker on all nodes; ends the session, and returns False, if too few are left."""
        assert self._data_path.proxy is not None
        loss = WorkerLoss(
            rank=self._job.rank(worker.client),
            pid=worker.pid,
            fate=fate,
            last_step=self._data_path.proxy.last_step(worker.client),
            lost_at=time.strftime("%H:%M:%S"),
        )
        self._membership.lose(worker.client, loss)
        self._data_path.proxy.lose_worker(worker.client, loss.to_node())
        if failure := self._shortage():
            self._abort(failure)
            self._leave(worker)
        return failure is None

    def _shortage(self) -> Failure | None:
        """Why those that are left cannot go on without the lost workers; None if they can."""
        members = self._membership
        if not members.are_enough:
            return too_few_workers(members.losses, members.num_left, self._job.min_workers)
        if self._job.num_nodes > 1 and members.is_node_empty:
            return node_without_workers(self._job, members.losses)
        return None

    def _lose_elsewhere(self, loss: WorkerLoss) -> None:
        """Goes on without a worker of another node, unless too few are left on all nodes."""
        if not self._membership.lose_elsewhere(loss) or not self._can_go_on:
            return
        if failure := self._shortage():
            self._abort(failure)
        else:
            self._tell_who_goes_on(loss)

    def _lose_node(self, node: int, reason: str) -> Failure | None:
        """Notes the loss of all workers of another node; returns why those that are left cannot go on."""
        lost_at = time.strftime("%H:%M:%S")
        known = {loss.rank for loss in self._membership.losses}
        for rank in self._job.nodes[node]:
            if rank not in known:
                self._membership.lose_elsewhere(node_of_worker_lost(node, rank, reason, lost_at))
        return self._shortage()

    def _started_proxy(self) -> _native.Proxy:
        assert self._data_path.proxy is not None
        return self._data_path.proxy

    def _tell_who_goes_on(self, loss: WorkerLoss) -> None:
        if self._job.is_home and not loss.is_departure:
            logger.warning("[md%s] %s. The other %s go on", self._job.device, loss, self._membership.num_left)

    def _bury_member(self, worker: WorkerConnection) -> None:
        """Takes the last contributions of a worker that pushes nothing more."""
        proxy = self._data_path.proxy
        assert proxy is not None
        proxy.client_ended(worker.client)
        self._registrar.lose(worker.client, proxy)
        self._storage.leave(worker.client)
        worker.close()

    def _note_drained(self, client: int, pid: int, device: int) -> None:
        if self._membership.drain(client, pid, device) and self._data_path.proxy is not None:
            self._data_path.proxy.stand_in_for(client)

    # ---- newcomers, in the places of lost workers ----

    def is_vacant(self, client: int) -> bool:
        """Whether a newcomer may take the place of a lost worker."""
        return self._can_go_on and self._job.replaces_workers and self._membership.is_vacant(client)

    def _admit_newcomer(self, worker: WorkerConnection) -> None:
        client, entry = worker.client, worker.entry
        self._membership.admit(client, entry)
        if client in self._job.local_clients:
            segment = self._data_path.new_client_segment()
            self._peers.tell({"type": "client", "client": client, "entry": entry}, [segment.fd])
            self._data_path.add_newcomer(client, entry, segment)
        self._map_newcomer(client)

    def _take_client(self, client: int, message: Message, segment: Segment) -> None:
        """Takes a worker's segment that another device has allocated."""
        if not self._data_path.is_started:
            return self._data_path.take_client(client, segment)
        self._data_path.add_newcomer(client, str(message["entry"]), segment)
        self._map_newcomer(client)

    def _map_newcomer(self, client: int) -> None:
        """Serves a newcomer when its segment and its hello have arrived."""
        entry = self._membership.newcomers.get(client, "")
        if not entry or not self._data_path.map_newcomer(client, entry):
            return
        self._registrar.admit(client)
        self._workers.send(client, self._welcome_message(), self._welcome_fds(client))
        self._data_path.release_clients()

    def _await_membership(self, worker: WorkerConnection, _: Message) -> None:
        """Lets a newcomer, which all devices have welcomed, become a member at the next boundary."""
        proxy = self._data_path.proxy
        if worker.client not in self._membership.newcomers or proxy is None:
            raise ProtocolError("'ready' comes from a member")
        self._membership.wait(worker.client)
        proxy.set_ready(worker.client, True)

    def _settle_newcomers(self) -> None:
        """Notes which newcomers are members: a boundary has been completed, by any device."""
        for client in self._membership.newcomers:
            is_member = self._data_path.member_since(client) != _native.NO_EPOCH
            if is_member and self._membership.may_be_member(client):
                self._membership.settle(client)

    def _lose_newcomer(self, worker: WorkerConnection) -> None:
        """Goes on without a newcomer, which is a loss only if it is a member when its process ends."""
        proxy = self._data_path.proxy
        assert proxy is not None
        proxy.set_ready(worker.client, False)
        if self._membership.may_be_member(worker.client):
            return self._workers.await_end(worker, lambda: self._bury_newcomer(worker))
        self._workers.forget(worker)
        self._bury_newcomer(worker)

    def _bury_newcomer(self, worker: WorkerConnection) -> None:
        proxy, client = self._data_path.proxy, worker.client
        assert proxy is not None
        self._settle_newcomers()
        if client not in self._membership.newcomers:
            return self._lose_member(worker, "died")
        self._membership.forget(client)
        proxy.newcomer_ended(client)
        self._registrar.lose(client, proxy)
        self._storage.leave(client)
        worker.close()

    def _turn_newcomers_away(self) -> None:
        """Informs newcomers that no step follows, if the members have finished."""
        entering = self._membership.entering
        if entering and not self._workers.present(sorted({*range(self._job.num_clients)} - entering)):
            for worker in self._workers.present(sorted(entering)):
                worker.send(training_over().to_message("aborted"))

    def _leave(self, worker: WorkerConnection) -> None:
        self._workers.forget(worker)
        proxy = self._data_path.proxy
        if proxy is not None:
            proxy.client_left(worker.client)
        if self._registrar.is_waiting_for(worker.client):
            self._abort(self._departure())
        if not self._is_over():
            # At the very end, memory is freed with the process; sync cores may still be working.
            self._registrar.release_all(worker.client, proxy)
        self._storage.leave(worker.client)
        worker.close()
        self._turn_newcomers_away()

    def _register(self, worker: WorkerConnection, message: Message) -> None:
        self._registrar.register(worker.client, message)
        # A refused worker has also requested the group, and may have left before others request it here.
        if any(map(self._registrar.is_waiting_for, self._departed)):
            self._abort(self._departure())

    def _unregister(self, worker: WorkerConnection, message: Message) -> None:
        if not self._is_to_be_continued():  # the next attempt needs groups that workers release on leaving
            self._registrar.unregister(worker.client, message, self._data_path.proxy)

    def _warm_snapshots(self, message: Message) -> None:
        proxy = self._data_path.running_proxy
        snapshots = None if proxy is None else proxy.snapshots_of(int_field(message, "group"))
        if snapshots is not None:
            self._snapshots.warm(snapshots)

    def _tell_departures(self, worker: WorkerConnection, _: Message) -> None:
        ranks, lost = self._other_nodes.departed_ranks, self._other_nodes.lost.nodes
        worker.send({"type": "departures", "ranks": sorted(ranks), "lost_nodes": sorted(lost)})

    def _tell_late_workers(self, worker: WorkerConnection, message: Message) -> None:
        group = int_field(message, "group")
        worker.send({"type": "late_workers", "group": group, "clients": self._registrar.late_clients(group)})

    def _set_bandwidth(self, worker: WorkerConnection, message: Message) -> None:
        bucket = int_field(message, "bucket")
        worker.send(self._data_path.links.set_bandwidth(bucket, message.get("gbytes_per_s")))

    def _report_pacing(self, worker: WorkerConnection, _: Message) -> None:
        worker.send(self._data_path.links.report())

    def _send_transfers(self, worker: WorkerConnection, _: Message) -> None:
        log_fd = self._data_path.transfer_log_fd()
        worker.send({"type": "transfers"}, [log_fd])
        os.close(log_fd)

    @property
    def _departed(self) -> set[int]:
        """Clients that have left, and are not lost."""
        return self._workers.departed - self._membership.lost

    def _departure(self) -> Failure:
        proxy = self._data_path.proxy
        departed = dict.fromkeys(self._other_nodes.departed_ranks, 0)
        for client in self._departed:
            departed[self._job.rank(client)] = 0 if proxy is None else proxy.last_step(client)
        return workers_departed(departed, self._failed_ranks)

    # ---- the data path ----

    def _take_proxy_events(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        proxy = self._data_path.proxy
        assert proxy is not None
        self._other_nodes.take_events(proxy)
        for client in proxy.take_drained():
            pid = self._membership.pid(client)
            self._peers.tell({"type": DRAINED, "client": client, "pid": pid})
            self._note_drained(client, pid, self._job.device)
        for client, text in proxy.take_events():
            if client == _native.THIS_DEVICE:
                self._fail(text)
            elif text and client >= 0:
                if not self._workers[client].has_left:
                    self.worker_misbehaved(self._workers[client], text)
            elif text:
                self._abort(Failure(error="SchemaMismatchError", text=self._registrar.name_tensors(text)))
            else:
                self._abort(self._departure())

    def _fail(self, reason: str) -> NoReturn:
        """Reports the reason to all workers, then ends this process, whose contents cannot be saved."""
        loss = device_failed(self._job, reason)
        self._abort(loss)
        # Other devices' workers would notice this device's end before their own device can report the reason.
        others = set(range(self._job.num_clients)) - set(self._job.local_clients)
        for worker in self._workers.present(sorted(others)):
            worker.send(loss.to_message("aborted"))
        logger.error("%s", loss.text)
        # Threads may still wait for memory that no longer works.
        os._exit(1)

    def _abort(self, loss: Failure) -> None:
        """Reports the failure to every worker once, and accepts no more gradients.

        Thus workers that do not need the lost process also stop. Each worker receives the report from its local
        device, or from all others if the local device may be the one without progress.
        """
        if self._is_aborted:
            return
        self._loss = loss
        self._status.tell_loss(loss.text)
        self._contents.failures[_FAILURE_KINDS.get(loss.error, "other")] += 1
        self._gauge()
        self._peers.tell(loss.to_message("abort"))
        if loss.is_of_node and self._job.may_lose_nodes and self._data_path.is_started:
            self._other_nodes.lost.announce_end(loss)
        elif self._data_path.proxy is not None:
            self._data_path.proxy.abort_nodes(loss.to_node())
        running = self._data_path.running_proxy
        is_device_silent = loss.silent_device >= 0
        clients = range(self._job.num_clients) if is_device_silent else self._job.local_clients
        told = [*self._workers.present(clients)]
        for worker in told:
            worker.send(loss.to_message("aborted"))
        if running is not None:
            running.abort([worker.client for worker in told])

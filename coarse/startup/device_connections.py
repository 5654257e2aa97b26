"""Connects workers with their memory devices: the node's first worker starts them, and all workers join them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coarse.client.client import Client
from coarse.client.control.connection import DeviceConnection, DeviceUnreadyError, collect_replies
from coarse.client.node_agreement import NodeAgreement
from coarse.emulation.machine import Emulation, choose_emulation
from coarse.env import WorkerIdentity
from coarse.errors import (
    CoarseError,
    MemoryDeviceLostError,
    RendezvousError,
    WorkerLostError,
    follow_up,
    is_follow_up,
)
from coarse.machine.memory_name import MemoryName
from coarse.machine.partition_table import PartitionTable, choose_partition_table
from coarse.process.late_notice import LateNotice
from coarse.proxy.memory import try_memory
from coarse.rendezvous.workers import NodeMap, PeerWatch
from coarse.settings import Settings
from coarse.startup.device_checks import check_devices
from coarse.startup.device_processes import DeviceProcesses
from coarse.startup.nearest_gpus import pair_with_nearest
from coarse.startup.node_links import link_nodes
from coarse.startup.persistent_devices import Keeping, find_persistent_devices, introducer, read_token
from coarse.startup.shared_link_table import shared_link_table
from coarse.store import Store
from coarse.wire.algorithms import distant_gpus
from coarse.wire.messages import Received
from coarse.wire.pace import choose_pace
from coarse.wire.persistent_sessions import make_session_directory
from coarse.wire.socket_directory import socket_path

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # for workers that are about to join


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """A worker's data about its session before memory devices exist.

    Args:
        identity, store, settings: As for Session.join().
        nodes: The nodes of the job.
        watch: Notices workers that are lost during the start.
        keeping: Where to find memory devices that outlived the previous attempt's workers; None without persistent
            devices.
    """

    identity: WorkerIdentity
    store: Store
    settings: Settings
    nodes: NodeMap
    watch: PeerWatch
    keeping: Keeping | None

    @property
    def node(self) -> int:
        """This worker's node."""
        return self.nodes.node_of(self.identity.rank)

    @property
    def leader(self) -> int:
        """The first worker of this node, by rank."""
        return self.nodes.ranks[self.node][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDevices:
    """The memory devices of this node.

    Args:
        nodes: The nodes of the job.
        node: Number of this node.
        directory: Directory of their sockets.
        table: The workers that each device serves.
        emulation: Emulated links; None without emulation.
        processes: The processes, on the worker that started them.
    """

    nodes: NodeMap
    node: int
    directory: str
    table: PartitionTable
    emulation: Emulation | None
    processes: DeviceProcesses | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The workers of this node, by client number."""
        return self.nodes.ranks[self.node]

    @property
    def local_devices(self) -> list[int]:
        """The memory device of each worker of this node, by client number."""
        return [self.table.local_device(worker) for worker in range(self.table.num_workers)]


def provide_devices(joining: Joining) -> NodeDevices:
    """Starts the memory devices of the node on its first worker, and finds them on the others.

    Raises:
        RendezvousError: If the first worker has started none in time or could not connect them with other nodes, or
            if kept devices belong to other workers.
        MemoryDeviceLostError: If it could not start them.
        ValueError: If the partition table or the emulated machine does not fit.
    """
    if joining.identity.rank != joining.leader:
        return _find_devices(joining)
    store, settings = joining.store, joining.settings
    try:
        table = _choose_table(joining)
        emulation = choose_emulation(
            settings.machine,
            table,
            time_dilation=settings.time_dilation,
            num_logged=settings.transfer_log,
            dense=settings.dense,
            num_nodes=joining.nodes.num_nodes,
        )
        directory, processes = _start_missing(joining, table, emulation)
    except (OSError, ValueError, CoarseError) as error:
        if not (
            is_follow_up(error) or isinstance(error, WorkerLostError)
        ):  # all workers hear of these themselves
            store.set(_announcement_key(joining.node), json.dumps({"error": str(error)}).encode())
        if isinstance(error, ValueError | CoarseError):
            raise
        raise MemoryDeviceLostError(
            f"worker {joining.leader} could not start memory devices: {error}"
        ) from error
    announcement = {
        "directory": directory,
        "workers": [device.workers for device in table.devices],
        "memories": table.memories,
        "emulation": None if emulation is None else emulation.to_json(),
    }
    store.set(_announcement_key(joining.node), json.dumps(announcement).encode())
    return NodeDevices(
        nodes=joining.nodes,
        node=joining.node,
        directory=directory,
        table=table,
        emulation=emulation,
        processes=processes,
    )


def _announcement_key(node: int) -> str:
    """The store key under which the first worker of a node publishes its memory devices."""
    return f"devices/{node}"


def _choose_table(joining: Joining) -> PartitionTable:
    """The workers and the memory of each memory device; refuses contradictory settings."""
    settings, nodes = joining.settings, joining.nodes
    num_places = len(nodes.ranks[joining.node])
    table = choose_partition_table(
        settings.partition_table,
        num_workers=num_places - len(nodes.vacant),
        devices=settings.memory_devices,
    )
    check_devices(settings, table, num_nodes=nodes.num_nodes)
    if not settings.partition_table and not settings.machine:
        table = pair_with_nearest(table)
    return table.with_places(num_places)


def _start_missing(
    joining: Joining, table: PartitionTable, emulation: Emulation | None
) -> tuple[str, DeviceProcesses | None]:
    """Starts the memory devices of `table` that were not kept; returns where all listen, and the processes if any."""
    settings, nodes, node, keeping = joining.settings, joining.nodes, joining.node, joining.keeping
    found = None if keeping is None else find_persistent_devices(keeping, table, settings.replicas)
    if found is not None and not found.lost:
        return str(found.directory), None
    lost = None if found is None else found.lost
    for device, memory in enumerate(table.memories):
        if lost is None or device in lost:
            try_memory(memory)
    if distant := distant_gpus(table):
        logger.warning(
            "%s cannot reach each other's memory: memory devices there copy data through the host, except with NCCL",
            ", ".join(distant),
        )
    persistent_directory = None if found is None else found.directory
    if keeping is not None and found is None:
        persistent_directory = make_session_directory(keeping.attempt.job, keeping.session)
    timeout_s, watch = settings.timeout_s, joining.watch
    with (
        shared_link_table(
            nodes, node, joining.store, emulation, timeout_s=timeout_s, watch=watch
        ) as link_table_fd,
        link_nodes(
            nodes, node, joining.store, num_devices=table.num_devices, settings=settings, watch=watch
        ) as links,
    ):
        processes = DeviceProcesses(
            table=table,
            settings=settings,
            nodes=nodes,
            node=node,
            links=links,
            emulation=emulation,
            link_table_fd=link_table_fd,
            persistent_directory=persistent_directory,
            replaces=lost,
            introduce=introducer(str(persistent_directory), settings, watch),
        )
    return processes.directory, processes


def _find_devices(joining: Joining) -> NodeDevices:
    leader, timeout_s = joining.leader, joining.settings.timeout_s
    try:
        answer = told_by_leader(joining, _announcement_key(joining.node), "start memory devices")
    except TimeoutError:
        raise RendezvousError(
            f"worker {joining.identity.rank}: worker {leader} has started no memory devices within {timeout_s:.1f} s"
        ) from None
    announcement = json.loads(answer)
    if "error" in announcement:
        text = f"worker {leader} could not start memory devices: {announcement['error']}"
        raise MemoryDeviceLostError(follow_up(f"worker {joining.identity.rank}: {text}", f"worker {leader}"))
    emulation = announcement["emulation"]
    return NodeDevices(
        nodes=joining.nodes,
        node=joining.node,
        directory=announcement["directory"],
        table=PartitionTable.of_workers(
            announcement["workers"], [MemoryName.parse(name) for name in announcement["memories"]]
        ),
        emulation=None if emulation is None else Emulation.from_json(emulation),
    )


def told_by_leader(joining: Joining, key: str, what: str) -> bytes:
    """The value that the first worker of the node sets for a key when it has finished `what`.

    Raises:
        TimeoutError: If it does not set the key within the settings' timeout.
        WorkerLostError: If a worker ends during the wait.
    """
    rank, settings = joining.identity.rank, joining.settings

    def tell(waited_s: float) -> None:
        logger.warning(
            "[w%d] has waited %.0f s for %s to %s; gives up after %g s (COARSE_TIMEOUT_S)",
            *(rank, waited_s, joining.watch.describe(joining.leader), what, settings.timeout_s),
        )

    notice = LateNotice(settings.warn_after_s, tell)
    return joining.watch.get(joining.store, key, settings.timeout_s, notice.look)


def connect(joining: Joining, node: NodeDevices) -> Client:
    """Joins every memory device of the node; returns when all workers have joined.

    Raises:
        SyncTimeoutError: If other workers do not join in time.
        MemoryDeviceLostError, WorkerLostError: If a process dies during the wait.
    """
    rank, settings, watch = joining.identity.rank, joining.settings, joining.watch
    connections: list[DeviceConnection] = []
    number = node.ranks.index(rank)
    watch.check()
    try:
        token = read_token(node.directory)
        for device in range(node.table.num_devices):
            connections.append(DeviceConnection(device, socket_path(node.directory, device)))
        for connection in connections:
            connection.send({"type": "hello", "token": token, "client": number})
        replies = collect_replies(
            connections,
            kind="welcome",
            group=None,
            timeout_s=settings.timeout_s,
            what=f"worker {rank}: joining the memory devices",
            on_silence=watch.check,
        )
        names = [joining.watch.describe(each) for each in node.ranks]
        client = open_client(rank, settings, node, connections, replies, names=names, store=joining.store)
    except BaseException as error:
        for connection in connections:
            connection.close()
        if isinstance(error, DeviceUnreadyError):
            if node.processes is not None:
                node.processes.reap(_PATIENCE_S)  # they must inform the other workers too
            raise type(error.reason)(f"worker {rank}: {error.reason}") from None
        if isinstance(error, MemoryDeviceLostError | WorkerLostError):
            # One loss causes others: devices end with the worker that started them, workers with any other worker.
            watch.check()
        raise
    return client


def open_client(
    rank: int,
    settings: Settings,
    node: NodeDevices,
    connections: Sequence[DeviceConnection],
    replies: Mapping[int, Received],
    *,
    names: Sequence[str],
    store: Store | None,
    is_newcomer: bool = False,
) -> Client:
    """The client of a worker that all memory devices of its node have welcomed.

    Args:
        rank, settings, node: This worker, its settings and its memory devices.
        connections: One to each of these.
        replies: Their welcomes, whose descriptors this function closes.
        names: Descriptions of the node's workers, by client number.
        store: The session's store; None if nobody uses it any more.
        is_newcomer: As for Client.
    """
    fds = next(reply.fds for reply in replies.values() if reply.fds)
    segment_fd, doorbells_fd, metrics_fd, *epochs = fds
    number = node.ranks.index(rank)
    for connection in connections:
        connection.pid = int(replies[connection.device].message["pid"])
    client = Client(
        ranks=node.ranks,
        vacant=node.nodes.vacant,
        number=number,
        table=node.table,
        emulation=node.emulation,
        connections=connections,
        segment_fd=segment_fd,
        doorbells_fd=doorbells_fd,
        metrics_fd=metrics_fd,
        epochs_fd=epochs[0] if epochs else -1,
        is_newcomer=is_newcomer,
        settings=settings,
        pace=choose_pace(settings, node.table.num_devices, len(node.ranks)),
        names=names,
        agreement=NodeAgreement(
            rank,
            node.nodes,
            store,
            timeout_s=settings.timeout_s,
            warn_after_s=settings.warn_after_s,
            may_lose_workers=settings.least_workers > 0,
        ),
        fate_of_device=_died if node.processes is None else node.processes.fate,
        kill_silent=_killer(node, connections) if number == 0 else _leave_to_leader,
        has_nccl=all(reply.message["has_nccl"] is True for reply in replies.values()),
    )
    for fd in fds:
        os.close(fd)
    return client


def _died(device: int) -> str:
    del device
    return "died"


def _killer(node: NodeDevices, connections: Sequence[DeviceConnection]) -> Callable[[int], None]:
    """Returns the function by which the node's first worker kills a failed device, even of an earlier attempt."""

    def kill(device: int) -> None:
        if node.processes is None or not node.processes.kill_silent(device):
            # The process lives: its connection is open.
            with contextlib.suppress(ProcessLookupError):
                os.kill(connections[device].pid, signal.SIGKILL)

    return kill


def _leave_to_leader(device: int) -> None:
    del device

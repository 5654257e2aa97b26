"""How a worker comes to its memory devices: started by the first worker of the node, joined by all."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from coarse.client.client import Client
from coarse.client.connection import DeviceConnection, collect_replies
from coarse.env import Settings, WorkerIdentity
from coarse.errors import MemoryDeviceLostError, RendezvousError, WorkerLostError
from coarse.machine.partition_table import PartitionTable, choose_partition_table
from coarse.proxy.launch import TOKEN_FILE, DeviceProcesses, choose_pace, socket_path
from coarse.rendezvous import PeerWatch
from coarse.store import Store

_KEY = "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDevices:
    """The memory devices of this node.

    Args:
        directory: Where their sockets are.
        table: Whom each serves.
        processes: The processes, on the worker that started them.
    """

    directory: str
    table: PartitionTable
    processes: DeviceProcesses | None = None


def provide_devices(
    identity: WorkerIdentity, store: Store, settings: Settings, watch: PeerWatch
) -> NodeDevices:
    """Starts the memory devices of the node on its first worker, and finds them on the others.

    Raises:
        RendezvousError: If the first worker has started none in time.
        MemoryDeviceLostError: If it could not start them.
        ValueError: If the partition table does not fit.
    """
    if identity.rank != 0:
        return _find_devices(identity, store, settings, watch)
    try:
        table = choose_partition_table(
            settings.partition_table,
            num_workers=identity.world_size,
            num_devices=settings.memory_devices,
        )
        processes = DeviceProcesses(table=table, settings=settings)
    except (OSError, ValueError) as error:
        store.set(_KEY, json.dumps({"error": str(error)}).encode())
        if isinstance(error, ValueError):
            raise
        raise MemoryDeviceLostError(f"worker 0 could not start memory devices: {error}") from error
    workers = [device.workers for device in table.devices]
    store.set(_KEY, json.dumps({"directory": processes.directory, "workers": workers}).encode())
    return NodeDevices(directory=processes.directory, table=table, processes=processes)


def _find_devices(
    identity: WorkerIdentity, store: Store, settings: Settings, watch: PeerWatch
) -> NodeDevices:
    try:
        announcement = json.loads(watch.get(store, _KEY, settings.timeout_s))
    except TimeoutError:
        raise RendezvousError(
            f"worker {identity.rank}: worker 0 has started no memory devices within {settings.timeout_s:.1f} s"
        ) from None
    if "error" in announcement:
        raise MemoryDeviceLostError(f"worker 0 could not start memory devices: {announcement['error']}")
    return NodeDevices(
        directory=announcement["directory"], table=PartitionTable.of_workers(announcement["workers"])
    )


def connect(identity: WorkerIdentity, settings: Settings, node: NodeDevices, watch: PeerWatch) -> Client:
    """Joins every memory device of the node; returns when all workers have.

    Raises:
        SyncTimeoutError: If others do not come in time.
        MemoryDeviceLostError, WorkerLostError: If a process dies meanwhile.
    """
    connections: list[DeviceConnection] = []
    watch.check()
    try:
        token = _read_token(node.directory)
        for device in range(node.table.num_devices):
            connections.append(DeviceConnection(device, socket_path(node.directory, device)))
        for connection in connections:
            connection.send({"type": "hello", "token": token, "client": identity.rank})
        replies = collect_replies(
            connections,
            kind="welcome",
            group=None,
            timeout_s=settings.timeout_s,
            what=f"worker {identity.rank}: joining the memory devices",
            on_silence=watch.check,
        )
        segment_fd, doorbells_fd = next(reply.fds for reply in replies.values() if reply.fds)
        for connection in connections:
            connection.pid = int(replies[connection.device].message["pid"])
        client = Client(
            rank=identity.rank,
            num_clients=identity.world_size,
            local_device=node.table.local_device(identity.rank),
            connections=connections,
            segment_fd=segment_fd,
            doorbells_fd=doorbells_fd,
            settings=settings,
            pace=choose_pace(settings, node.table.num_devices, identity.world_size),
            fate_of_device=_died if node.processes is None else node.processes.fate,
        )
        os.close(segment_fd)
        os.close(doorbells_fd)
    except BaseException as error:
        for connection in connections:
            connection.close()
        if isinstance(error, MemoryDeviceLostError | WorkerLostError):
            # One loss brings another: devices end with the worker that started them, workers with any other's death.
            watch.check()
        raise
    return client


def _read_token(directory: str) -> str:
    try:
        return (Path(directory) / TOKEN_FILE).read_text()
    except FileNotFoundError:
        raise MemoryDeviceLostError(
            "the memory devices have ended before all workers had joined them"
        ) from None


def _died(device: int) -> str:
    del device
    return "died"

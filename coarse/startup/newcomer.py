"""A worker that joins a running job in the place of a lost one (docs/design/membership.md)."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coarse.client.client import Client
from coarse.client.control.connection import DeviceConnection, collect_replies
from coarse.env import WorkerIdentity
from coarse.errors import RendezvousError
from coarse.machine.memory_name import MemoryName
from coarse.machine.partition_table import PartitionTable
from coarse.rendezvous.workers import NodeMap
from coarse.settings import Settings
from coarse.startup.device_connections import NodeDevices, open_client
from coarse.startup.persistent_devices import read_token
from coarse.wire.messages import Message
from coarse.wire.socket_directory import socket_path

_RETRY_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """The data by which a newcomer finds a running session; its first worker gives them to the launcher.

    Args:
        directory: Directory of the memory devices' sockets.
        workers, memories: The workers and the memory of each memory device.
        shard_bytes: Partition threshold of the session's tensors.
        next_group: Number of the session's first tensor group after its start.
    """

    directory: str
    workers: tuple[tuple[int, ...], ...]
    memories: tuple[str, ...]
    shard_bytes: int
    next_group: int

    @classmethod
    def of_session(cls, node: NodeDevices, *, shard_bytes: int, next_group: int) -> Invitation:
        """The invitation to a session that has just started."""
        return cls(
            directory=node.directory,
            workers=tuple(tuple(device.workers) for device in node.table.devices),
            memories=tuple(map(str, node.table.memories)),
            shard_bytes=shard_bytes,
            next_group=next_group,
        )

    def to_fields(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> Invitation:
        """Reads the JSON of to_fields().

        Raises:
            RendezvousError: If it cannot be read.
        """
        try:
            fields = json.loads(text)
            return cls(**{**fields, "workers": tuple(map(tuple, fields["workers"]))})
        except (ValueError, KeyError, TypeError) as error:
            raise RendezvousError(f"COARSE_INVITATION={text[:100]!r} cannot be read: {error}") from None


class _OccupiedError(Exception):
    """The memory devices are not done with the former worker of this place."""


def enter_session(
    identity: WorkerIdentity, settings: Settings, invitation: Invitation
) -> tuple[Client, NodeDevices]:
    """Connects a newcomer to the memory devices of a running session.

    Raises:
        RendezvousError: If its place does not become vacant in time.
        MemoryDeviceLostError: If the session has ended.
    """
    table = PartitionTable.of_workers(
        invitation.workers, [MemoryName.parse(each) for each in invitation.memories]
    )
    node = NodeDevices(
        nodes=NodeMap(ranks=(tuple(range(table.num_workers)),), boots=("",)),
        node=0,
        directory=invitation.directory,
        table=table,
        emulation=None,
    )
    deadline = time.monotonic() + settings.timeout_s
    while True:
        connections = [
            DeviceConnection(device, socket_path(node.directory, device))
            for device in range(table.num_devices)
        ]
        try:
            return _enter(identity, settings, node, connections), node
        except _OccupiedError as error:
            _close(connections)
            if time.monotonic() >= deadline:
                raise RendezvousError(str(error)) from None
            time.sleep(_RETRY_INTERVAL_S)
        except BaseException:
            _close(connections)
            raise


def _enter(
    identity: WorkerIdentity, settings: Settings, node: NodeDevices, connections: Sequence[DeviceConnection]
) -> Client:
    rank = identity.rank
    hello: Message = {"type": "hello", "token": read_token(node.directory), "client": rank}
    entry = secrets.token_hex(8)
    for connection in connections:
        connection.send({**hello, "entry": entry})

    def raise_occupied(_: Message) -> None:
        raise _OccupiedError(
            f"worker {rank}: the job still has a worker of this rank, or its memory devices do not take another one"
        )

    replies = collect_replies(
        connections,
        kind="welcome",
        group=None,
        timeout_s=settings.timeout_s,
        what=f"worker {rank}: joining the memory devices of a running job",
        notes={"occupied": raise_occupied},
    )
    return open_client(
        rank,
        settings,
        node,
        connections,
        replies,
        names=[f"worker {each}" for each in node.ranks],
        store=None,
        is_newcomer=True,
    )


def _close(connections: Sequence[DeviceConnection]) -> None:
    for connection in connections:
        connection.close()

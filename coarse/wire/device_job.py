"""What a memory device process is told when a session starts it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace

from coarse.kernels import _native
from coarse.machine.emulation import Emulation

HOME_DEVICE = 0
"""The device that keeps what all devices share."""


DOORBELLS = "doorbells"
RING_LOGS = "ring logs"
EXCHANGE_LOGS = "exchange logs"
LINK_TABLE = "link table"
COLLECTIVE_LOGS = "collective logs"
NCCL_ID = "nccl id"
"""Names of memory that all devices share (docs/design/arena.md)."""

NCCL_ID_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJob:
    """A memory device's place in one session. Passed as JSON through an inherited descriptor, never by argv.

    Args:
        device: This device, 0 <= device < num_devices.
        num_devices: Memory devices of the node.
        num_clients: Workers of the node.
        node: The node's number.
        nodes: The ranks of the workers of every node, this one's by client number.
        local_clients: The workers whose slots lie in this device's memory.
        memories: What each device of the node owns, as in MemoryName.
        clients_in_memory: The workers whose slots lie there, in segments of this device and of others that own the
            same.
        num_sync_cores: Threads that reduce.
        scheduling: "queues" or "fcfs".
        spin_us: How long an idle sync core looks for work before it sleeps.
        has_rings: Whether the ring algorithm may be used; its buffers take some memory.
        has_exchange: Whether the exchange algorithm may be used.
        has_nccl: Whether NCCL may be used, between GPUs.
        snapshot_pool_bytes: As in Settings.
        emulation: JSON of the Emulation; "" if links are those that are there.
        directory: Where workers find the device (coarse.wire.socket_directory).
        listen_fd: A listening SEQPACKET socket there.
        peer_fds: A connected SEQPACKET socket to each other device; -1 in this device's own place.
        link_fds: Connected stream sockets to devices of other nodes, by node.
        token: What a worker must show to be let in, hexadecimal.
        leader_pid: The process that started this device, which ends with it before all have come; 0 for none.
        join_timeout_s: How long to wait for all workers to connect.
        heartbeat_s: How long another device may do no work at all; 0 for ever.
        keep_s: How long to wait for the workers of the next attempt, if those of one are lost; 0 for not at all.
        replicas: How many devices, the next ones of the ring, have the contents of each once more.
        clients_of: The workers that each device serves.
    """

    device: int
    num_devices: int
    num_clients: int
    node: int
    nodes: tuple[tuple[int, ...], ...]
    local_clients: tuple[int, ...]
    memories: tuple[str, ...]
    clients_in_memory: tuple[int, ...]
    num_sync_cores: int
    scheduling: str
    spin_us: int
    has_rings: bool
    has_exchange: bool
    has_nccl: bool
    snapshot_pool_bytes: int
    emulation: str
    directory: str
    listen_fd: int
    peer_fds: tuple[int, ...]
    link_fds: tuple[tuple[int, ...], ...]
    token: str
    leader_pid: int
    join_timeout_s: float
    heartbeat_s: float
    keep_s: float
    replicas: int = 0
    clients_of: tuple[tuple[int, ...], ...] = ()

    @property
    def memory(self) -> str:
        """What this device owns."""
        return self.memories[self.device]

    @property
    def is_home(self) -> bool:
        """Whether this device keeps what all devices share."""
        return self.device == HOME_DEVICE

    @property
    def replica_keeper(self) -> int:
        """The device that keeps the replica of what the home device has; -1 without."""
        return (HOME_DEVICE + 1) % self.num_devices if self.replicas else -1

    @property
    def keeps_replica(self) -> bool:
        """Whether this is that device."""
        return self.device == self.replica_keeper

    @property
    def is_replica_near(self) -> bool:
        """Whether that replica lies in the same memory as what it is a replica of."""
        return self.memories[HOME_DEVICE] == self.memories[self.replica_keeper]

    @property
    def needs_nccl(self) -> bool:
        """Whether there is nothing else to choose."""
        return self.has_nccl and not self.has_exchange

    @property
    def num_nodes(self) -> int:
        """Nodes of the job."""
        return len(self.nodes)

    def local_device(self, client: int) -> int:
        """The device that serves a worker."""
        return next(device for device, clients in enumerate(self.clients_of) if client in clients)

    def rank(self, client: int) -> int:
        """What a worker of this node is called in messages."""
        return self.nodes[self.node][client]

    def own_memory(self) -> dict[str, int]:
        """What this device allocates in the host's memory for all devices to share: bytes by name."""
        own = {}
        if self.is_home:
            own[DOORBELLS] = _native.doorbells_bytes(self.num_devices)
        if self.is_home and self.has_rings:
            own[RING_LOGS] = _native.RING_LOGS_BYTES
        if self.is_home and self.has_exchange:
            own[EXCHANGE_LOGS] = _native.exchange_logs_bytes(self.num_devices)
        if self.is_home and self.has_nccl:
            own |= {COLLECTIVE_LOGS: _native.COLLECTIVE_LOGS_BYTES, NCCL_ID: NCCL_ID_BYTES}
        if self.is_home and self.emulation:
            own[LINK_TABLE] = link_table_bytes(Emulation.from_json(self.emulation))
        if self.has_rings:
            own[self.ring_names()[self.device]] = _native.RING_SEGMENT_BYTES
        return own

    def own_messages(self) -> str:
        """What it allocates besides, where its tensors lie: the name; "" without rings."""
        return self.message_names()[self.device] if self.has_rings else ""

    def shared_memory(self) -> set[str]:
        """Names of all that the devices share together."""
        names = {DOORBELLS, *self.ring_names(), *self.message_names()}
        optional = {
            RING_LOGS: self.has_rings,
            EXCHANGE_LOGS: self.has_exchange,
            LINK_TABLE: bool(self.emulation),
            COLLECTIVE_LOGS: self.has_nccl,
            NCCL_ID: self.has_nccl,
        }
        return names | {name for name, is_there in optional.items() if is_there}

    def ring_names(self) -> list[str]:
        """Names of the ring buffers, one of each device; empty without rings."""
        return [f"ring buffers of md{device}" for device in range(self.num_devices) if self.has_rings]

    def message_names(self) -> list[str]:
        """The same of what goes through these buffers."""
        return [f"ring messages of md{device}" for device in range(self.num_devices) if self.has_rings]

    def with_own_sockets(self) -> DeviceJob:
        """The same with duplicates of its sockets, for one attempt to close."""
        return replace(
            self,
            listen_fd=os.dup(self.listen_fd),
            peer_fds=tuple(-1 if fd < 0 else os.dup(fd) for fd in self.peer_fds),
        )

    def with_peers(self, lost: Collection[int], replaced: Mapping[int, int]) -> DeviceJob:
        """The same when other devices are not there any more, or others have come in their place.

        Args:
            lost: Devices whose socket is of no use; it is closed.
            replaced: A socket, which now belongs to the job, of each device that is new.
        """
        fds = list(self.peer_fds)
        for device in {*lost, *replaced}:
            if fds[device] >= 0:
                os.close(fds[device])
            fds[device] = -1
        for device, fd in replaced.items():
            if device in lost:
                os.close(fd)
            else:
                fds[device] = fd
        return replace(self, peer_fds=tuple(fds))

    def to_json(self) -> bytes:
        """The form in which it is passed."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, fd: int) -> DeviceJob:
        """Reads a job from `fd` to its end, and closes it."""
        with os.fdopen(fd, "rb") as stream:
            values = json.load(stream)
        for name in ("local_clients", "memories", "clients_in_memory", "peer_fds"):
            values[name] = tuple(values[name])
        for name in ("nodes", "link_fds", "clients_of"):
            values[name] = tuple(map(tuple, values[name]))
        return cls(**values)


def link_table_bytes(emulation: Emulation) -> int:
    """Memory that the link table takes."""
    links = emulation.links
    return _native.link_table_bytes(links.num_endpoints, len(links.buckets), emulation.num_logged)

"""The job description that a session gives to a memory device process."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace

from coarse.emulation.machine import Emulation
from coarse.emulation.paced_links import link_table_bytes
from coarse.kernels import _native
from coarse.settings import NODE_COMPRESSIONS
from coarse.wire.reconnection_plan import ReconnectionPlan

HOME_DEVICE = 0
"""The device that keeps the state that all devices share."""


DOORBELLS = "doorbells"
RING_LOGS = "ring logs"
EXCHANGE_LOGS = "exchange logs"
LINK_TABLE = "link table"
COLLECTIVE_LOGS = "collective logs"
NCCL_ID = "nccl id"
METRICS = "metrics"
EPOCHS = "epochs"
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
        nodes: The ranks of every node's workers; those of this node by client number.
        local_clients: The workers whose slots lie in this device's memory.
        memories: The memory of each device of the node, as in MemoryName.
        clients_in_memory: The workers whose slots lie in this device's memory, in its segments and in those of other
            devices that own the same memory.
        num_sync_cores: Threads that reduce.
        scheduling: "queues" or "fcfs".
        spin_us: How long an idle sync core polls for work before it sleeps.
        has_rings: Whether the ring algorithm may be used; its buffers use some memory.
        has_exchange: Whether the exchange algorithm may be used.
        has_nccl: Whether NCCL may be used, between GPUs.
        snapshot_pool_bytes: As in Settings.
        emulation: JSON of the Emulation; "" for real links.
        directory: Where workers find the device (coarse.wire.socket_directory).
        listen_fd: A listening SEQPACKET socket in that directory.
        peer_fds: A connected SEQPACKET socket to each other device; -1 for this device itself.
        link_fds: Connected stream sockets to devices of other nodes, by node.
        reconnection: How these are replaced when they break; None in a job of one node.
        token: The token that a worker must present to join, hexadecimal.
        leader_pid: The process that started this device. The device ends with it until all workers have joined; 0
            for none.
        join_timeout_s: How long to wait for all workers to connect.
        node_patience_ms: Milliseconds for which another node may answer nothing before it is lost.
        node_compression: As in Settings.
        heartbeat_s: Seconds without progress before another device counts as lost; 0 disables.
        keep_s: How long to wait for the workers of the next attempt if workers are lost; 0 disables waiting.
        replicas: Extra copies of each memory device's contents, on the next devices of the ring.
        min_workers: Workers that suffice to go on after others are lost; 0 if the first loss ends the session.
        replaces_workers: Whether new workers take the places of lost ones, and vacant ones.
        vacant: Clients that have no worker at the start.
        clients_of: The workers that each device serves.
        link_table_fd: The link table, if several nodes share it; -1 if the home device writes it.
        metrics_address, metrics_port: Where the home device serves the node's metrics; port 0 for nowhere.
        timeline, timeline_events: As in Settings.
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
    node_patience_ms: int
    heartbeat_s: float
    keep_s: float
    replicas: int = 0
    min_workers: int = 0
    replaces_workers: bool = False
    node_compression: str = "none"
    vacant: tuple[int, ...] = ()
    clients_of: tuple[tuple[int, ...], ...] = ()
    reconnection: ReconnectionPlan | None = None
    link_table_fd: int = -1
    metrics_address: str = ""
    metrics_port: int = 0
    timeline: str = ""
    timeline_events: int = 0

    @property
    def memory(self) -> str:
        """The memory that this device owns."""
        return self.memories[self.device]

    @property
    def is_home(self) -> bool:
        """Whether this device keeps the state that all devices share."""
        return self.device == HOME_DEVICE

    @property
    def replica_keeper(self) -> int:
        """The device that keeps the replica of the home device; -1 without replicas."""
        return (HOME_DEVICE + 1) % self.num_devices if self.replicas else -1

    @property
    def keeps_replica(self) -> bool:
        """Whether this device keeps that replica."""
        return self.device == self.replica_keeper

    @property
    def is_replica_near(self) -> bool:
        """Whether that replica lies in the same memory as its original."""
        return self.memories[HOME_DEVICE] == self.memories[self.replica_keeper]

    @property
    def needs_nccl(self) -> bool:
        """Whether NCCL is the only choice."""
        return self.has_nccl and not self.has_exchange

    @property
    def founders(self) -> tuple[int, ...]:
        """Clients that have a worker at the start."""
        return tuple(client for client in range(self.num_clients) if client not in self.vacant)

    @property
    def num_nodes(self) -> int:
        """Nodes of the job."""
        return len(self.nodes)

    @property
    def num_workers(self) -> int:
        """Workers of all nodes, with vacant places."""
        return sum(map(len, self.nodes))

    @property
    def may_lose_nodes(self) -> bool:
        """Whether the other nodes go on without a lost one; the same on all nodes, unless some have GPUs."""
        is_plain = self.node_compression == "none" and not self.emulation
        has_gpus = any(memory.startswith("cuda") for memory in self.memories)
        return self.num_ranks > 0 and is_plain and not has_gpus

    @property
    def num_ranks(self) -> int:
        """The same, if there are several nodes and they go on without lost workers; else 0."""
        return self.num_workers if self.min_workers and self.num_nodes > 1 else 0

    def local_device(self, client: int) -> int:
        """The device that serves a worker."""
        return next(device for device, clients in enumerate(self.clients_of) if client in clients)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this node's workers, by client number."""
        return self.nodes[self.node]

    @property
    def compression_number(self) -> int:
        """How gradients travel between nodes, as native code numbers it."""
        return NODE_COMPRESSIONS.index(self.node_compression)

    def rank(self, client: int) -> int:
        """The rank of a worker of this node, as messages name it."""
        return self.ranks[client]

    def own_memory(self) -> dict[str, int]:
        """The memory that this device allocates on the host for all devices to share: bytes by name."""
        own = {}
        if self.is_home:
            own[DOORBELLS] = _native.doorbells_bytes(self.num_devices)
            own[METRICS] = _native.metrics_bytes(self.num_devices, self.num_clients)
        if self.is_home and self.replaces_workers:
            own[EPOCHS] = _native.EPOCHS_BYTES
        if self.is_home and self.has_rings:
            own[RING_LOGS] = _native.RING_LOGS_BYTES
        if self.is_home and self.has_exchange:
            own[EXCHANGE_LOGS] = _native.exchange_logs_bytes(self.num_devices)
        if self.is_home and self.has_nccl:
            own |= {COLLECTIVE_LOGS: _native.COLLECTIVE_LOGS_BYTES, NCCL_ID: NCCL_ID_BYTES}
        if self.is_home and self.emulation and self.link_table_fd < 0:
            own[LINK_TABLE] = link_table_bytes(Emulation.from_json(self.emulation))
        if self.has_rings:
            own[self.ring_names()[self.device]] = _native.RING_SEGMENT_BYTES
        return own

    def own_messages(self) -> str:
        """Name of the memory that this device also allocates next to its tensors; "" without rings."""
        return self.message_names()[self.device] if self.has_rings else ""

    def shared_memory(self) -> set[str]:
        """Names of all memory that the devices share."""
        names = {DOORBELLS, METRICS, *self.ring_names(), *self.message_names()}
        optional = {
            RING_LOGS: self.has_rings,
            EXCHANGE_LOGS: self.has_exchange,
            LINK_TABLE: bool(self.emulation),
            COLLECTIVE_LOGS: self.has_nccl,
            NCCL_ID: self.has_nccl,
            EPOCHS: self.replaces_workers,
        }
        return names | {name for name, is_there in optional.items() if is_there}

    def ring_names(self) -> list[str]:
        """Names of the ring buffers, one of each device; empty without rings."""
        return [f"ring buffers of md{device}" for device in range(self.num_devices) if self.has_rings]

    def message_names(self) -> list[str]:
        """Names of the message memory for these buffers, one of each device."""
        return [f"ring messages of md{device}" for device in range(self.num_devices) if self.has_rings]

    def with_own_sockets(self) -> DeviceJob:
        """This job with duplicated sockets, which one attempt closes."""
        return replace(
            self,
            listen_fd=os.dup(self.listen_fd),
            peer_fds=tuple(-1 if fd < 0 else os.dup(fd) for fd in self.peer_fds),
        )

    def with_peers(self, lost: Collection[int], replaced: Mapping[int, int]) -> DeviceJob:
        """This job after other devices were lost or replaced.

        Args:
            lost: Lost devices; their sockets are closed.
            replaced: A socket to each replacement, which now belongs to the job.
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
        """The JSON form that read() reads."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, fd: int) -> DeviceJob:
        """Reads a job from `fd` to its end, and closes it."""
        with os.fdopen(fd, "rb") as stream:
            values = json.load(stream)
        for name in ("local_clients", "memories", "clients_in_memory", "peer_fds", "vacant"):
            values[name] = tuple(values[name])
        for name in ("nodes", "link_fds", "clients_of"):
            values[name] = tuple(map(tuple, values[name]))
        if values["reconnection"] is not None:
            values["reconnection"] = ReconnectionPlan.from_json(values["reconnection"])
        return cls(**values)

"""Registers tensor groups at one memory device, from the first worker's request to the last one's release."""

from __future__ import annotations

import errno
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from coarse.errors import CoarseError, OutOfDeviceMemoryError, SchemaMismatchError
from coarse.kernels import _native
from coarse.profiler.partition import LOGGED_ALGORITHMS, PartitionPlan
from coarse.proxy.memory import DeviceMemories, DeviceMemory, HostMemory
from coarse.proxy.outbox import SendToPeers, SendToWorker
from coarse.proxy.recovery.persistent_groups import PersistentGroups
from coarse.proxy.snapshots.group_snapshots import GroupSnapshots, allocate_snapshots, choose_pool_limit
from coarse.proxy.snapshots.snapshot_service import SnapshotService
from coarse.wire.device_job import HOME_DEVICE, DeviceJob
from coarse.wire.messages import Message, int_field
from coarse.wire.registration import (
    CONTROL,
    NODE,
    PARAMETERS,
    REPLICA_CONTROL,
    REPLICA_OF,
    REPLICA_PARAMETERS,
    REPLICA_STATES,
    ROWS,
    SETTINGS,
    SLOTS,
    SNAPSHOT_CONTROL,
    SNAPSHOT_POOL,
    SNAPSHOT_REQUEST,
    STATES,
    UNDO_CONTROL,
    UNDO_PARAMETERS,
    UNDO_STATES,
    GroupSchema,
    RecoveredUpdates,
    Registration,
    WorkerMemory,
    WorkerPlaces,
    check_agreement,
    fd_of,
    region_of,
    slots_of,
)
from coarse.wire.segments import Segment, pack
from coarse.wire.slot_routes import check_routes, pieces_of_slots

logger = logging.getLogger(__name__)

_NUMBERED_TENSOR = re.compile(r"tensor #(\d+)/(\d+)")  # TensorGroup::describeTensor()
_MOST_GROUP_ID = (1 << 32) - 1

_GRADIENTS, _COPIES, _SNAPSHOTS, _OTHER = "gradients", "copies", "snapshots", "other"
_USES = {
    **{name: name for name in (PARAMETERS, STATES)},
    **dict.fromkeys((UNDO_PARAMETERS, UNDO_STATES, REPLICA_PARAMETERS, REPLICA_STATES), _COPIES),
    SNAPSHOT_POOL: _SNAPSHOTS,
}
"""Uses of the segments that a node holds once; copies are for recovery."""


class Registrar:
    """Serves the registration messages of docs/design/control-protocol.md. Used from the control thread alone.

    A group becomes active when all workers have requested the same group, and every device has allocated its share
    and received the other devices' shares. The home device checks that everything fits before any device allocates.

    Args:
        job: The device's place in the session.
        memories: The memories for slots and for data that the node holds once.
        send: Sends a reply to a worker.
        send_to_peers: Sends a message to the other devices.
        snapshots: Reads snapshots of groups, if this is the home device.
        kept: Groups of an earlier attempt, and groups to keep for a later one.
        replicas: The same for the replicas that this device keeps for the home device.
        member_since: The first epoch of the worker in a place (docs/design/membership.md).
    """

    def __init__(
        self,
        job: DeviceJob,
        memories: DeviceMemories,
        send: SendToWorker,
        send_to_peers: SendToPeers,
        snapshots: SnapshotService,
        kept: PersistentGroups,
        replicas: PersistentGroups,
        member_since: Callable[[int], int] = lambda client: 0,
    ) -> None:
        self._job = job
        self._memory = memories.own
        self._common = memories.common
        self._send = send
        self._send_to_peers = send_to_peers
        self._snapshots = snapshots
        self._kept = kept
        self._replicas = replicas
        self._registrations: dict[int, Registration] = {}
        self._released: set[int] = set()  # numbers of released groups; never reused
        self._lost: set[int] = set()
        self._member_since = member_since

    def register(self, client: int, message: Message) -> None:
        """Handles a worker's request for a group."""
        group = int_field(message, "group", high=_MOST_GROUP_ID)
        if self._job.replaces_workers and group in self._released:
            return self._answer_released(client, group)
        registration = self._registration(group)
        schema = GroupSchema.from_message(message)
        if self._job.replaces_workers and registration.is_active:
            return self._join(registration, client, schema)
        registration.schemas[client] = schema
        registration.joined.add(client)
        if "epoch" in message:
            registration.epoch = max(
                registration.epoch, int_field(message, "epoch", high=_native.NO_EPOCH - 1)
            )
        registration.places[client] = WorkerPlaces(
            on_gpu=message.get("is_on_gpu") is True, with_nccl=message.get("has_nccl") is True
        )
        registration.memories[client] = WorkerMemory.from_message(message)
        if registration.refusal is not None:
            self._send(client, registration.refusal, ())

    def _answer_released(self, client: int, group: int) -> None:
        """Answers a newcomer, which registers a group that the others no longer have."""
        message: Message = {"type": "registered", "group": group, "is_released": True}
        self._send(client, {**message, "fds": [], "extents": [], "unreserved": []}, ())

    def _join(self, registration: Registration, client: int, schema: GroupSchema) -> None:
        """Answers a newcomer, which registers a group that the others have registered."""
        first = min(each for each in registration.schemas if each != client)
        try:
            check_agreement(
                self._job.rank(first), registration.schemas[first], self._job.rank(client), schema
            )
        except SchemaMismatchError as error:
            return self._send(client, self._refusal_of(registration, error), ())
        registration.joined.add(client)
        registration.released.discard(client)
        read_only = self._to_read(registration)
        self._answer(registration, client, read_only)
        for segment in read_only.values():
            segment.close()

    def unregister(self, client: int, message: Message, proxy: _native.Proxy | None) -> None:
        """Handles a worker's release of a group."""
        registration = self._registrations.get(int_field(message, "group", high=_MOST_GROUP_ID))
        if registration is not None:
            self._release(registration, client, proxy)

    def release_all(self, client: int, proxy: _native.Proxy | None) -> None:
        """Releases all groups of a worker that has left."""
        for registration in list(self._registrations.values()):
            self._release(registration, client, proxy)

    def lose(self, client: int, proxy: _native.Proxy) -> None:
        """Releases all groups of a lost worker, which from now on follows the others' registrations."""
        self._lost.add(client)
        for registration in self._registrations.values():
            registration.joined.discard(client)
        self.release_all(client, proxy)

    def admit(self, client: int) -> None:
        """Admits a newcomer in the place of a lost worker. Others register without it until it is a member."""
        self._lost.discard(client)

    def _is_needed(self, registration: Registration, client: int) -> bool:
        """Whether a worker takes part in a registration and its release."""
        if client in self._lost:
            return False
        return client in registration.joined or self._member_since(client) <= registration.epoch

    def is_waiting_for(self, client: int) -> bool:
        """Whether other workers have requested a group that this worker has not."""
        return any(client not in registration.schemas for registration in self._registrations.values())

    @property
    def allocated_bytes(self) -> int:
        """Memory that this device has reserved for all groups."""
        return sum(self.reserved_bytes().values())

    def reserved_bytes(self) -> dict[str, int]:
        """Memory that this device has reserved for all groups, by its use; from any thread."""
        total: Counter[str] = Counter()
        for registration in list(self._registrations.values()):
            total.update(registration.reserved)
        return dict(total)

    def late_clients(self, group: int) -> list[int]:
        """Workers that have not requested a group."""
        registration = self._registrations.get(group)
        asked = {} if registration is None else registration.schemas
        return [client for client in range(self._job.num_clients) if client not in {*asked, *self._lost}]

    def name_tensors(self, text: str) -> str:
        """A native message with the names of tensors in place of their numbers."""
        return _NUMBERED_TENSOR.sub(lambda match: self._tensor_name(int(match[1]), int(match[2])), text)

    def _tensor_name(self, group: int, tensor: int) -> str:
        registration = self._registrations.get(group)
        schema = None if registration is None else next(iter(registration.schemas.values()), None)
        if schema is None or tensor >= len(schema.specs):
            return f"tensor {tensor}"
        return f"tensor {schema.specs[tensor].name!r} of {schema.name}"

    def take_peer_memory(self, message: Message, segments: list[Segment]) -> None:
        """Takes the share of a group that another device has allocated."""
        group = int_field(message, "group")
        if group in self._released:  # it was refused, and all workers released it before this message
            for segment in segments:
                segment.close()
            return
        registration = self._registration(group)
        if isinstance(recovered := message.get("recovered"), dict):
            registration.recovered = RecoveredUpdates.from_message(recovered)
        received = iter(segments)
        for client, place in message["slots"]:
            registration.slot_pieces[client, place] = next(received)
        for own, names in (
            (registration.settings, message["settings"]),
            (registration.rows, message["rows"]),
            (registration.shared, message["shared"]),
        ):
            own.update((name, next(received)) for name in names)

    def advance(self, proxy: _native.Proxy) -> None:
        """Performs every action that has become possible."""
        for registration in list(self._registrations.values()):
            self._advance(registration, proxy)

    def close(self) -> None:
        """Frees the memory of groups that never became active."""
        for registration in self._registrations.values():
            registration.close()

    def _registration(self, group: int) -> Registration:
        return self._registrations.setdefault(group, Registration(group))

    def _release(self, registration: Registration, client: int, proxy: _native.Proxy | None) -> None:
        registration.released.add(client)
        needed = (each for each in range(self._job.num_clients) if self._is_needed(registration, each))
        if not registration.released.issuperset(needed):
            return
        if registration.is_active and proxy is not None:
            self._snapshots.remove(registration.group)
            proxy.remove_group(registration.group)
        registration.close()
        self._kept.forget(registration.group)
        self._replicas.forget(registration.group)
        del self._registrations[registration.group]
        self._released.add(registration.group)

    def _advance(self, registration: Registration, proxy: _native.Proxy) -> None:
        if registration.refusal is not None or registration.is_active:
            return
        self._register_absent(registration)
        if len(registration.schemas) < self._job.num_clients:
            return
        try:
            if not registration.is_allocated:
                self._check_agreement(registration)
                if not self._job.is_home and CONTROL not in registration.shared:
                    return
                self._allocate(registration)
            if self._is_shared(registration) and registration.has_all_slots:
                registration.join_slots()
                self._activate(registration, proxy)
        except (CoarseError, ValueError) as error:
            self._refuse(registration, error)
        except _native.CudaError as error:
            self._refuse(registration, CoarseError(f"{self._cannot_serve(registration)}: {error}"))
        except OSError as error:
            kind = OutOfDeviceMemoryError if error.errno == errno.ENOMEM else CoarseError
            text = (
                f"{self._cannot_serve(registration)}: {error}. Check the limits of its process: `ulimit -a`"
            )
            self._refuse(registration, kind(text))

    def _register_absent(self, registration: Registration) -> None:
        """Registers for lost workers and newcomers what another one has registered. Their slots stay empty."""
        absent = {each for each in range(self._job.num_clients) if not self._is_needed(registration, each)}
        members = registration.schemas.keys() - absent
        for client in absent - registration.schemas.keys() if members else ():
            registration.schemas[client] = registration.schemas[min(members)]
            registration.places[client] = WorkerPlaces()
            registration.memories[client] = WorkerMemory(
                reserves=registration.memories[min(members)].reserves
            )

    def _cannot_serve(self, registration: Registration) -> str:
        device = f"memory device md{self._job.device} ({self._job.memory})"
        return f"{device} cannot serve the tensors {registration.schema.name!r}"

    def _is_shared(self, registration: Registration) -> bool:
        """Whether all memory that the node holds once exists."""
        is_replicated = self._is_replicated(registration.schema)
        return CONTROL in registration.shared and (
            not is_replicated or REPLICA_CONTROL in registration.shared
        )

    def _undoes(self, schema: GroupSchema) -> bool:
        """Whether to undo a step that not all shards have completed when workers are lost."""
        return self._job.keep_s > 0 and schema.updates_early

    def _is_replicated(self, schema: GroupSchema) -> bool:
        return self._job.replicas > 0 and schema.state_names is not None

    def _check_agreement(self, registration: Registration) -> None:
        first = min(registration.schemas)
        for client in sorted(registration.schemas):
            check_agreement(
                self._job.rank(first),
                registration.schemas[first],
                self._job.rank(client),
                registration.schemas[client],
            )

    def _allocate(self, registration: Registration) -> None:
        schema = registration.schema
        check_routes(schema, self._job, is_on_gpu=not self._memory_of(schema).is_mappable)
        if self._job.is_home:
            # Before building the plan: the plan of a tensor larger than all memory would not fit either.
            self._check_fits(registration)
        plan = schema.partition()
        if self._job.is_home:
            self._reserve_log(registration, plan)
        native_plan = schema.native_plan(registration.group, self._job.num_clients, self._job.num_ranks)
        shared = {}
        if self._job.is_home:
            if (kept := self._kept.find(schema)) is not None:
                registration.recovered = kept.updates
            shared = self._allocate_shared(registration, native_plan)
        elif self._job.keeps_replica and self._is_replicated(schema):
            shared = self._allocate_replica(registration, native_plan)
        registration.shared.update(shared)
        own = self._allocate_slots(registration, native_plan.client_bytes)
        settings, rows = {}, {}
        for client in self._job.local_clients:
            if num_bytes := native_plan.settings_bytes:
                settings[client] = self._memory.allocate_host(f"settings of {schema.name}", num_bytes)
            if num_bytes := native_plan.rows_bytes:
                rows[client] = self._memory.allocate_sparse(f"rows of {schema.name}", num_bytes)
        registration.settings.update(settings)
        registration.rows.update(rows)
        registration.is_allocated = True
        segments = [*own.values(), *settings.values(), *rows.values(), *shared.values()]
        registration.reserved = _bytes_by_use(
            gradients=[*own.values(), *rows.values()], other=settings.values(), shared=shared
        )
        extents, fds = pack(segments)
        self._send_to_peers(
            {
                "type": "segments",
                "group": registration.group,
                "slots": list(own),
                "settings": list(settings),
                "rows": list(rows),
                "shared": list(shared),
                "recovered": None if registration.recovered is None else registration.recovered.to_message(),
                "extents": extents,
            },
            fds,
        )

    def _allocate_slots(self, registration: Registration, num_bytes: int) -> dict[tuple[int, int], Segment]:
        """This device's pieces of the slots of all workers, by worker and position among its pieces."""
        schema = registration.schema
        registration.pieces = pieces_of_slots(schema, self._job, num_bytes)
        own = {}
        for client, pieces in registration.pieces.items():
            for place, piece in enumerate(pieces):
                if piece.device == self._job.device:
                    label = f"gradients of {schema.name}"
                    segment = self._allocate_tensors(
                        registration, self._memory_of(schema), label, piece.num_bytes
                    )
                    own[client, place] = registration.slot_pieces[client, place] = segment
        return own

    def _allocate_tensors(
        self, registration: Registration, memory: DeviceMemory, label: str, num_bytes: int
    ) -> Segment:
        """Memory for slots, parameters or states; without pages if workers reserve them later."""
        if registration.is_reserved_later and memory.takes_pages_later:
            return memory.allocate_sparse(label, num_bytes)
        return memory.allocate(label, num_bytes)

    def _reserve_log(self, registration: Registration, plan: PartitionPlan) -> None:
        """Ensures that the devices' logs have room for all shards that can be in progress between devices."""
        logged = (*LOGGED_ALGORITHMS, *(("direct",) if self._job.emulation else ()))
        num_shards = sum(shard.algorithm in logged for shard in plan.shards)
        num_others = sum(each.num_logged_shards for each in self._registrations.values())
        if num_shards + num_others > _native.RING_LOG_CAPACITY:
            raise ValueError(
                f"{registration.schema.name}: its {num_shards} shards and {num_others} of other registrations "
                f"exceed the {_native.RING_LOG_CAPACITY} that memory devices can process at once; raise "
                "COARSE_SHARD_BYTES"
            )
        registration.num_logged_shards = num_shards

    def _memory_of(self, schema: GroupSchema) -> DeviceMemory:
        """The memory of a group's tensors."""
        return HostMemory() if schema.on_host and not self._memory.is_mappable else self._memory

    @property
    def _sent_from(self) -> DeviceMemory:
        """The memory for data to and from other nodes: sockets do not support GPU memory."""
        return self._memory if self._memory.is_mappable else HostMemory()

    def _reach_of(self, schema: GroupSchema) -> DeviceMemory:
        """The memory through which this device reaches all tensors of a group and their optimizer states."""
        keeps_states = self._job.is_home and schema.state_names is not None
        return self._common if keeps_states else self._memory_of(schema)

    def _used_of(self, registration: Registration) -> Mapping[str, Segment]:
        """The shared segments that this device needs; of GPU memory only those that it updates or copies."""
        shared = registration.shared
        if self._job.keeps_replica and self._is_replicated(registration.schema):
            return shared
        used = {name: segment for name, segment in shared.items() if name not in REPLICA_OF.values()}
        if self._job.is_home:
            return used
        return {name: segment for name, segment in used.items() if not segment.gpus}

    def _allocate_shared(self, registration: Registration, plan: _native.GroupPlan) -> dict[str, Segment]:
        """Allocates the memory that a node holds once for all its workers."""
        schema = registration.schema
        num_bytes = {}
        if schema.state_names is not None:
            num_bytes[PARAMETERS] = plan.parameter_bytes
        if plan.kept_bytes:
            num_bytes[STATES] = plan.kept_bytes
        kept = self._kept.find(schema)
        found = {} if kept is None else kept.segments
        allocated = {
            name: found[name].duplicate()
            if name in found
            else self._allocate_tensors(registration, self._common, f"{name} of {schema.name}", length)
            for name, length in num_bytes.items()
        }
        if self._job.num_nodes > 1:
            node_bytes = _native.node_segment_bytes(
                plan,
                self._job.node,
                self._job.num_nodes,
                is_staged=not self._memory_of(schema).is_mappable,
                compression=self._job.compression_number,
                is_whole=self._job.may_lose_nodes,
            )
            allocated[NODE] = self._sent_from.allocate(f"{NODE} of {schema.name}", node_bytes)
        control_bytes = _native.group_control_bytes(
            plan.num_shards, self._job.num_clients, self._job.num_ranks
        )
        allocated[CONTROL] = self._memory.allocate_host(f"{CONTROL} of {schema.name}", control_bytes)
        if self._undoes(schema):
            undo_bytes = {UNDO_PARAMETERS: plan.parameter_bytes, UNDO_STATES: plan.kept_bytes}
            for name, length in undo_bytes.items():
                if length:
                    allocated[name] = self._common.allocate(f"{name} of {schema.name}", length)
            allocated[UNDO_CONTROL] = self._memory.allocate_host(
                f"{UNDO_CONTROL} of {schema.name}", _native.undo_control_bytes(plan.num_shards)
            )
        if schema.state_names is not None:
            allocated.update(allocate_snapshots(self._common, schema.name, plan))
        return allocated

    def _allocate_replica(self, registration: Registration, plan: _native.GroupPlan) -> dict[str, Segment]:
        """Allocates this device's replica of the home device's contents."""
        schema = registration.schema
        kept = None if registration.recovered is None else self._replicas.find(schema)
        if kept is not None and kept.updates == registration.recovered:
            registration.is_replica_filled = True
            allocated = {REPLICA_OF[name]: segment.duplicate() for name, segment in kept.segments.items()}
        else:
            num_bytes = {REPLICA_PARAMETERS: plan.parameter_bytes, REPLICA_STATES: plan.kept_bytes}
            allocated = {
                name: self._memory.allocate(f"{name} of {schema.name}", length)
                for name, length in num_bytes.items()
                if length
            }
        allocated[REPLICA_CONTROL] = self._memory.allocate_host(
            f"{REPLICA_CONTROL} of {schema.name}", _native.replica_control_bytes(plan.num_shards)
        )
        return allocated

    def _check_fits(self, registration: Registration) -> None:
        """Raises OutOfDeviceMemoryError if a group does not fit when all of its pages are allocated.

        If pages come later, a group without an optimizer may never use any: one with an optimizer may replace it.
        """
        schema = registration.schema
        if registration.is_reserved_later and schema.state_names is None and self._common.takes_pages_later:
            return
        # A slot for each worker of this memory, and optimizer states.
        tensor_bytes = sum(spec.slot_bytes for spec in schema.specs)
        largest = max(spec.slot_bytes for spec in schema.specs)
        slot_bytes = (
            min(tensor_bytes, max(schema.window_bytes, largest)) if schema.window_bytes else tensor_bytes
        )
        num_clients = len(self._job.clients_in_memory)
        if schema.routes:  # except for small tensors
            is_here = [self._job.memories[table.bw_proxy] == self._job.memory for table in schema.routes]
            num_clients = max(1, sum(is_here))
        own = slot_bytes * num_clients
        common = schema.kept_bytes
        if (kept := self._kept.find(schema)) is not None:
            common -= sum(segment.num_bytes for segment in kept.segments.values())
        elif self._is_replicated(schema) and self._job.is_replica_near:
            own += schema.kept_bytes
        if self._undoes(schema):
            common += schema.kept_bytes
        if self._common.takes_pages_later:
            common -= registration.moved_bytes
        memory, sent = self._memory_of(schema), self._sent_bytes(schema, tensor_bytes)
        if memory.is_mappable:
            own += sent
        needs = [(memory, own + common // self._common.num_places)]
        if sent > 0 and not memory.is_mappable:
            needs.append((self._sent_from, sent))
        if common > 0:
            needs.append((self._common, common))
        for memory, needed in needs:
            available = memory.available_bytes()
            if needed > available:
                raise OutOfDeviceMemoryError(
                    f"{schema.name}: {num_clients} workers need {needed / 2**20:.1f} MiB of device memory for "
                    f"{len(schema.specs)} tensors, {available / 2**20:.1f} MiB are available on {memory.name}. Use "
                    "fewer workers on this node, a smaller model or a smaller dtype."
                )

    def _sent_bytes(self, schema: GroupSchema, tensor_bytes: int) -> int:
        """Size of a group's buffers on this node for data from and to other nodes.

        Space for each node's contribution to the shards that this node owns, or to all if nodes may be lost; if slots
        lie on a GPU, space for every other shard too, and for the compressed ones that it owns; with int8, space for
        rounding errors.
        """
        num_nodes = self._job.num_nodes
        if self._job.may_lose_nodes:
            return tensor_bytes * (num_nodes - 1)
        elsewhere = tensor_bytes * (num_nodes - 1) // num_nodes
        compresses = num_nodes > 1 and self._job.node_compression != "none"
        compressed = schema.compressible_bytes if compresses else 0
        residuals = compressed if self._job.node_compression == "int8" else 0
        if self._memory_of(schema).is_mappable:
            return elsewhere + residuals
        return 2 * elsewhere + compressed // num_nodes + residuals

    def _activate(self, registration: Registration, proxy: _native.Proxy) -> None:
        self._add_group(registration, proxy)
        for warning in _native.cuda_take_peer_warnings():
            logger.warning("[md%s] %s", self._job.device, warning)
        registration.is_active = True
        self._keep(registration)
        read_only = self._to_read(registration)
        for client in registration.joined:
            self._answer(registration, client, read_only)
        for segment in read_only.values():
            segment.close()
        if not self._job.replaces_workers:  # newcomers need it
            registration.close()

    def _to_read(self, registration: Registration) -> dict[str, Segment]:
        """This device's memory of a group for all workers to read."""
        read_only = self._open_slots(registration)
        if self._job.is_home:
            shared = registration.shared
            read_only |= {
                name: shared[name].to_read() for name in (CONTROL, SNAPSHOT_CONTROL) if name in shared
            }
        return read_only

    def _add_group(self, registration: Registration, proxy: _native.Proxy) -> None:
        shared, schema = self._used_of(registration), registration.schema
        if schema.is_boundary:
            proxy.set_boundary(registration.group)
        plan = schema.native_plan(registration.group, self._job.num_clients, self._job.num_ranks)
        versions = self._add_snapshots(registration, plan)
        updates = registration.recovered
        proxy.add_group(
            plan,
            shared[CONTROL].fd,
            [registration.slots[client].region for client in range(self._job.num_clients)],
            self._job.is_home,
            node_segment=region_of(shared, NODE),
            parameters=region_of(shared, PARAMETERS),
            states=region_of(shared, STATES),
            snapshot_request_fd=fd_of(shared, SNAPSHOT_REQUEST),
            snapshot_control_fd=fd_of(shared, SNAPSHOT_CONTROL),
            snapshot_pool_fd=fd_of(shared, SNAPSHOT_POOL),
            settings_fds=[registration.settings[client].fd for client in sorted(registration.settings)],
            memory=self._reach_of(schema).tensor_memory(),
            step=0 if updates is None else updates.step,
            update_numbers=() if updates is None else updates.num_updates,
            rows_fds=[registration.rows[client].fd for client in sorted(registration.rows)],
            replica=_native.Replica(
                control_fd=fd_of(shared, REPLICA_CONTROL),
                parameters=region_of(shared, REPLICA_PARAMETERS),
                states=region_of(shared, REPLICA_STATES),
                owner=HOME_DEVICE,
                keeper=max(self._job.replica_keeper, 0),
                is_filled=registration.is_replica_filled,
            ),
            undo=_native.UndoLog(
                control_fd=fd_of(shared, UNDO_CONTROL),
                parameters=region_of(shared, UNDO_PARAMETERS),
                states=region_of(shared, UNDO_STATES),
            ),
            versions=versions,
        )

    def _keep(self, registration: Registration) -> None:
        """Keeps data that the workers of another attempt, or another memory device, may request."""
        shared, schema = registration.shared, registration.schema
        if self._job.is_home and self._job.keep_s and schema.state_names is not None:
            self._kept.adopt(registration.group, schema, shared)
        if self._job.keeps_replica and REPLICA_CONTROL in shared:
            self._replicas.adopt(
                registration.group,
                schema,
                {name: shared[replica] for name, replica in REPLICA_OF.items() if replica in shared},
            )

    def _answer(self, registration: Registration, client: int, read_only: Mapping[str, Segment]) -> None:
        """Notifies a worker that the group is active, and sends this device's memory for it."""
        message: Message = {"type": "registered", "group": registration.group}
        given = dict(read_only)
        if self._job.is_home:
            shared = registration.shared
            given |= {name: shared[name] for name in (PARAMETERS, STATES, SNAPSHOT_REQUEST) if name in shared}
            places = registration.places.values()
            message["on_gpu"] = sum(place.on_gpu for place in places)
            message["with_nccl"] = sum(place.with_nccl for place in places)
            if registration.recovered is not None:
                message["recovered"] = registration.recovered.to_message()
        message["unreserved"] = self._names_to_reserve(registration, client)
        if client in self._job.local_clients:
            own = {SLOTS: registration.slots, SETTINGS: registration.settings, ROWS: registration.rows}
            given |= {name: segments[client] for name, segments in own.items() if client in segments}
        message["fds"] = list(given)
        message["extents"], fds = pack(given.values())
        self._send(client, message, fds)

    def _names_to_reserve(self, registration: Registration, client: int) -> list[str]:
        """Names of this device's memory whose pages the worker reserves itself."""
        if not registration.is_reserved_later:
            return []
        names = []
        if client in self._job.local_clients and self._memory_of(registration.schema).takes_pages_later:
            names.append(SLOTS)
        if self._job.is_home and self._common.takes_pages_later:
            names += [name for name in (PARAMETERS, STATES) if name in registration.shared]
        return names

    def _open_slots(self, registration: Registration) -> dict[str, Segment]:
        """Slots of this device's clients, for all workers to read in direct all-reduce."""
        if not registration.schema.is_open:
            return {}
        return {slots_of(client): registration.slots[client].to_read() for client in self._job.local_clients}

    def _add_snapshots(
        self, registration: Registration, plan: _native.GroupPlan
    ) -> _native.SnapshotPool | None:
        """Starts to serve a group's snapshots; returns the memory of old versions if only this device has them."""
        schema = registration.schema
        if not self._job.is_home or SNAPSHOT_CONTROL not in registration.shared:
            return None
        memory = self._reach_of(schema)
        versions = memory.snapshot_pool(plan)
        ranks = [self._job.rank(client) for client in range(self._job.num_clients)]
        snapshots = GroupSnapshots(
            schema, plan, registration.shared, memory.tensor_memory(), versions, ranks=ranks
        )
        # In whole pages, which small tensors do not fill.
        whole_bytes = _native.snapshot_pool_bytes(plan) // _native.SNAPSHOT_PLACES
        available_bytes = self._common.available_bytes() - self._still_to_take(registration, plan)
        limit_bytes = choose_pool_limit(self._job.snapshot_pool_bytes, whole_bytes, max(0, available_bytes))
        snapshots.set_limit(limit_bytes)
        self._snapshots.add(registration.group, snapshots)
        return versions

    def _still_to_take(self, registration: Registration, plan: _native.GroupPlan) -> int:
        """Bytes of host memory that workers have not yet reserved when a group becomes active."""
        if not registration.is_reserved_later or not self._common.takes_pages_later:
            return 0
        slot_bytes = plan.client_bytes * len(registration.slots)
        return slot_bytes + registration.schema.kept_bytes - registration.moved_bytes

    def _refuse(self, registration: Registration, error: Exception) -> None:
        registration.refusal = self._refusal_of(registration, error)
        for client in registration.schemas:
            self._send(client, registration.refusal, ())

    def _refusal_of(self, registration: Registration, error: Exception) -> Message:
        return {
            "type": "refused",
            "group": registration.group,
            "error": type(error).__name__,
            "text": str(error),
        }


def _bytes_by_use(
    *, gradients: Iterable[Segment], other: Iterable[Segment], shared: Mapping[str, Segment]
) -> dict[str, int]:
    uses: Counter[str] = Counter()
    uses[_GRADIENTS] += sum(each.num_bytes for each in gradients)
    uses[_OTHER] += sum(each.num_bytes for each in other)
    for name, segment in shared.items():
        uses[_USES.get(name, _OTHER)] += segment.num_bytes
    return dict(uses)

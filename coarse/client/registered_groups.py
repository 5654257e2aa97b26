"""The tensor groups of a client: registration with the memory devices of its node, and release."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from coarse.client.control.connection import DeviceConnection, check_peers, collect_replies, send_to_all
from coarse.client.control.failure_detector import FailureDetector
from coarse.client.control.requests import Requests
from coarse.client.memory.optimizer_memory import OptimizerMemory
from coarse.client.memory.reservations import Reservations
from coarse.client.memory.row_memory import RowMemory
from coarse.client.memory.slot_opener import SlotOpener
from coarse.client.node_agreement import NodeAgreement
from coarse.client.tensor_group import GroupClient, TensorGroup
from coarse.errors import CoarseError, MemoryDeviceLostError, WorkerLostError
from coarse.kernels import _native
from coarse.metrics.writer import MetricsWriter
from coarse.process.late_notice import LateNotice
from coarse.profiler.partition import PartitionPlan
from coarse.profiler.routing import RoutingTable, route_shards
from coarse.timeline import recorder
from coarse.timeline.part_files import GroupNames
from coarse.wire.device_job import HOME_DEVICE
from coarse.wire.messages import Message
from coarse.wire.registration import (
    CONTROL,
    ROWS,
    SLOTS,
    GroupSchema,
    RecoveredUpdates,
    WorkerMemory,
    WorkerPlaces,
    slots_of,
)
from coarse.wire.segments import Segment, unpack

logger = logging.getLogger(__name__)


class RegisteredGroups:
    """The groups from their registration, which every worker must do in the same way, until their release.

    Args:
        native: The client's data path.
        connections: One to each memory device of the node.
        agreement: Compares this node's registrations with those of other nodes.
        requests: Sends requests to memory devices.
        failure_detector: Detects lost workers and memory devices.
        metrics: Counts the waits.
    """

    def __init__(
        self,
        native: _native.Client,
        connections: Sequence[DeviceConnection],
        agreement: NodeAgreement,
        requests: Requests,
        failure_detector: FailureDetector,
        metrics: MetricsWriter,
    ) -> None:
        self._native = native
        self._metrics = metrics
        self._connections = connections
        self._agreement = agreement
        self._requests = requests
        self._failure_detector = failure_detector
        self.next_id = self._released_steps = 0
        self.epoch = 0
        """The epoch in which this worker registers groups (docs/design/membership.md)."""
        self._groups: dict[int, TensorGroup] = {}
        self._partitions: dict[int, PartitionPlan] = {}

    def __iter__(self) -> Iterator[TensorGroup]:
        """The current groups; groups may be released during iteration."""
        return iter(list(self._groups.values()))

    @property
    def num_steps(self) -> int:
        """Steps of the group with the most, also if it is released."""
        return max([self._released_steps, *(group.num_steps for group in self)])

    def register(
        self, client: GroupClient, schema: GroupSchema, gpu: str, memory: WorkerMemory, *, is_for_gpu: bool
    ) -> TensorGroup:
        """Registers a group of `client` with all memory devices; other arguments as for Client.register_trial()."""
        _native.cuda_unmap_unused()  # so that memory devices can reuse closed models' memory
        group = self.take_id()
        try:
            for connection in self._connections:
                connection.send(
                    schema.to_message(group)
                    | self._tell_places(gpu)
                    | memory.to_message()
                    | {"epoch": self.epoch}
                )
            shared, unreserved, recovered, places = self._collect_memory(client, group, schema)
        except (WorkerLostError, MemoryDeviceLostError) as error:
            raise self._failure_detector.explain(error) from error
        except CoarseError:
            send_to_all(self._connections, {"type": "unregister", "group": group})
            raise
        num_clients = len(client.ranks)
        plan = schema.native_plan(group, num_clients, client.num_ranks)
        if CONTROL not in shared:
            shared = _memory_of_released(schema, plan)
        partition = schema.partition()
        table = schema.routes[client.number] if schema.routes else client.routing
        routes = route_shards(table, partition, schema.specs)
        try:
            opener = SlotOpener(self._native, plan, client.number, shared, routes)
            slots, distant = opener.open(gpu, is_for_gpu=is_for_gpu)
            if schema.is_open:
                peers = [shared[slots_of(each)].region for each in range(num_clients)]
                self._native.add_peers(group, peers)
            if client.is_newcomer and schema.state_names is not None:
                step, num_updates = self._native.updates(group)
                recovered = RecoveredUpdates(step=step, num_updates=tuple(num_updates))
            kept = None if schema.state_names is None else OptimizerMemory(plan, shared, client.number, gpu)
            rows = RowMemory(schema.specs, plan, shared[ROWS].fd) if ROWS in shared else None
            reservations = Reservations(schema.name, {name: shared[name] for name in unreserved})
        finally:
            for segment in shared.values():
                segment.close()
        self._groups[group] = TensorGroup(
            client,
            self._native,
            group,
            schema,
            partition.tensor_offsets,
            slots,
            kept,
            recovered,
            rows,
            distant,
            places,
            reservations,
        )
        self._partitions[group] = partition
        if recorder.is_recording():
            self._name_in_timeline(client, group, schema.name, partition)
        return self._groups[group]

    def take_id(self) -> int:
        """The number of the next group, which all workers give it."""
        group, self.next_id = self.next_id, self.next_id + 1
        return group

    def _name_in_timeline(self, client: GroupClient, group: int, name: str, partition: PartitionPlan) -> None:
        names = GroupNames(
            session=self._native.timeline_session,
            group=group,
            name=name,
            ranks=client.ranks,
            device_pids=[connection.pid for connection in self._connections],
            tensors=[spec.name for spec in self._groups[group].specs],
            tensor_of_shard=[shard.tensor for shard in partition.shards],
        )
        recorder.note_group(names)

    def route(self, table: RoutingTable) -> None:
        """Routes every shard by `table` from its next push on."""
        for group, tensors in self._groups.items():
            if tensors.is_routed_by_itself:
                continue  # its slots would not move
            self._native.set_routes(group, route_shards(table, self._partitions[group], tensors.specs))

    def replace_slots(self, group: TensorGroup, moved: TensorGroup) -> None:
        """Gives a group the slots of `moved`, a registration of the same tensors, and releases its own."""
        before = group.id
        group.take_slots(moved)
        self._groups[group.id] = group
        self.release(before, tells_devices=True)

    def release(self, group: int, *, tells_devices: bool) -> None:
        """Releases a group, unless it was released before.

        Args:
            group: Number of the group.
            tells_devices: Whether to notify the memory devices; False if they are gone. They free the group's memory
                when every worker has released it.
        """
        released = self._groups.pop(group, None)
        if released is None:
            return
        self._released_steps = max(self._released_steps, released.num_steps)
        del self._partitions[group]
        # Memory devices may still read tensors that were pushed and never pulled, such as after an exception in a
        # backward pass. They keep such a group until the session ends.
        is_in_use = any(self._native.is_late(group, index) for index in range(len(released.specs)))
        self._native.remove_group(group)
        if not is_in_use and tells_devices:
            send_to_all(self._connections, {"type": "unregister", "group": group})

    def _tell_places(self, gpu: str) -> Message:
        """This worker's part of TensorGroup.places, as a message."""
        has_nccl = any(group.nccl.is_claimed for group in self)
        return {"is_on_gpu": bool(gpu), "has_nccl": has_nccl}

    def _collect_memory(
        self, client: GroupClient, group: int, schema: GroupSchema
    ) -> tuple[dict[str, Segment], list[str], RecoveredUpdates | None, WorkerPlaces]:
        """Waits until all nodes have registered the group, so that no push reaches a device without it."""
        home = self._connections[HOME_DEVICE]
        notice = LateNotice(
            client.warn_after_s, lambda waited_s: home.send({"type": "late_workers", "group": group})
        )

        def look() -> None:
            self._failure_detector.check_heartbeats()
            notice.look()

        def tell(message: Message) -> None:
            late = " and ".join(client.names[each] for each in message["clients"])
            logger.warning(
                "[w%d] has waited %.0f s for %s to register %s; gives up after %g s (COARSE_TIMEOUT_S). All "
                "workers must make this call",
                *(client.rank, notice.waited_s, late or "the memory devices", schema.name, client.timeout_s),
            )

        try:
            with self._metrics.waiting_for_answer():
                replies = collect_replies(
                    self._connections,
                    kind="registered",
                    group=group,
                    timeout_s=client.timeout_s,
                    what=f"worker {client.rank}: registering {schema.name}",
                    on_silence=look,
                    notes={"late_workers": tell},
                )
        except CoarseError as error:
            self._agreement.refuse(group, error)
            raise
        try:
            self._agreement.confirm(group, schema, self._departed)
        except BaseException:
            for reply in replies.values():
                reply.close()
            raise
        shared: dict[str, Segment] = {}
        unreserved: list[str] = []
        recovered, places = None, WorkerPlaces()
        for reply in replies.values():
            segments = unpack(reply.message["extents"], reply.fds)
            shared.update(zip(reply.message["fds"], segments, strict=True))
            unreserved += reply.message["unreserved"]
            if "recovered" in reply.message:
                recovered = RecoveredUpdates.from_message(reply.message["recovered"])
            if "on_gpu" in reply.message:
                places = WorkerPlaces(on_gpu=reply.message["on_gpu"], with_nccl=reply.message["with_nccl"])
        return shared, unreserved, recovered, places

    def _departed(self) -> set[int]:
        """Workers of other nodes that have closed the session, if the memory devices still live."""
        check_peers(self._connections)
        self._connections[0].send({"type": "departures"})
        answer = self._requests.wait_for(self._connections[0], "departures", "departures")
        self._agreement.note_lost(answer.message["lost_nodes"])
        return set(answer.message["ranks"])


def _memory_of_released(schema: GroupSchema, plan: _native.GroupPlan) -> dict[str, Segment]:
    """Memory for a group that only a newcomer has: the others have released it, and it is never pushed.

    Raises:
        CoarseError: If the group has an optimizer.
    """
    if schema.state_names is not None:
        raise CoarseError(
            f"{schema.name}: the others have moved these parameters again since they started, as "
            "add_param_group() does; a newcomer cannot follow that"
        )
    control_bytes = _native.group_control_bytes(plan.num_shards, plan.num_clients, plan.num_ranks)
    sizes = {CONTROL: control_bytes, SLOTS: plan.client_bytes}
    return {
        name: Segment(_native.create_sparse_sealed_memory(f"{name} of {schema.name}", size), size)
        for name, size in sizes.items()
    }

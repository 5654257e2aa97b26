"""The parameter client: a worker's end of the push and pull interface (COARSE paper, sections III-D and IV-B)."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coarse.client.async_reducer import AsyncReducer
from coarse.client.control.connection import DeviceConnection, SilentDeviceError, send_to_all
from coarse.client.control.failure_detector import (
    FailureDetector,
    FateOfDevice,
    KillSilent,
    heartbeat_limit_ms,
)
from coarse.client.control.requests import Requests
from coarse.client.direct_allreduce import NodeBarrier
from coarse.client.internal_groups import boundary_schema, node_barrier_schema, staging_schema
from coarse.client.link_probes import LinkProbes, probe_schema
from coarse.client.membership.members import Members
from coarse.client.membership.step_boundary import StepBoundary
from coarse.client.memory.parameter_storage import ParameterStorage, StorageSnapshot
from coarse.client.memory.stored_value import StoredValue
from coarse.client.node_agreement import NodeAgreement
from coarse.client.registered_groups import RegisteredGroups
from coarse.client.tensor_group import TensorGroup
from coarse.emulation.machine import Emulation
from coarse.errors import (
    CoarseError,
    ForkedSessionError,
    MemoryDeviceLostError,
    SessionClosedError,
    SyncTimeoutError,
    WorkerLostError,
    is_refusal,
)
from coarse.kernels import _native
from coarse.machine.partition_table import PartitionTable
from coarse.metrics.reader import MetricsReader
from coarse.metrics.values import Metrics
from coarse.metrics.writer import MetricsWriter
from coarse.profiler.link_plan import DEFAULT_SHARD_BYTES
from coarse.profiler.routing import RoutingTable
from coarse.schema import TensorSpec
from coarse.settings import Settings
from coarse.status.processes import describe_process, is_stopped
from coarse.wire.algorithms import (
    DIRECT,
    EXCHANGE,
    NCCL,
    RING,
    algorithms_of,
    measures_gpu_links,
    routable_algorithms,
)
from coarse.wire.device_job import HOME_DEVICE
from coarse.wire.messages import Message, Received
from coarse.wire.pace import Pace
from coarse.wire.registration import DTYPE_NUMBERS, EAGER, OP_NUMBERS, GroupSchema, WorkerMemory

if TYPE_CHECKING:  # slow to import, and needed between GPUs only
    from coarse.client.gpu.algorithm_choice import AlgorithmChoice

logger = logging.getLogger(__name__)

_EQUAL_DATA = (
    "give all workers as many batches (drop_last, drop_remainder), or train within join() in PyTorch"
)


class Client:
    """Registers tensors with the memory devices, pushes and pulls them.

    Thread safety: one caller at a time, from any thread.

    Args:
        ranks: The workers of this node, by client number.
        vacant: The ranks whose workers may join later.
        number: This worker's client number.
        table: The clients that each memory device of this node serves. This worker's own device takes its
            contributions until adopt_routing() is called.
        emulation: Emulated links; None without emulation.
        connections: One to each memory device; all devices have accepted this client.
        segment_fd, doorbells_fd, metrics_fd, epochs_fd: Descriptors that the local device sent with its welcome; the
            caller closes them. There are epochs only if new workers take the places of lost ones.
        is_newcomer: Whether this worker has the place of a lost one. Until join_training() returns, it exchanges
            nothing with the others, and every collective call has the result of a job of this worker alone.
        settings: The session's settings.
        pace: How this node shares its processors.
        names: Descriptions of this node's workers, by client number.
        agreement: Compares this node's registrations with those of other nodes.
        fate_of_device: Describes how a memory device ended.
        kill_silent: Kills a memory device that no longer works, on the worker that started it.
        has_nccl: Whether all memory devices have joined NCCL.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        vacant: Collection[int] = (),
        number: int,
        table: PartitionTable,
        emulation: Emulation | None,
        connections: Sequence[DeviceConnection],
        segment_fd: int,
        doorbells_fd: int,
        metrics_fd: int,
        epochs_fd: int = -1,
        is_newcomer: bool = False,
        settings: Settings,
        pace: Pace,
        names: Sequence[str],
        agreement: NodeAgreement,
        fate_of_device: FateOfDevice,
        kill_silent: KillSilent,
        has_nccl: bool,
    ) -> None:
        self.ranks = ranks
        self.rank = ranks[number]
        self.number = number
        """Client number of this worker on its node."""
        self._connections = connections
        self._settings = settings
        self._has_nccl = has_nccl
        self.timeout_s = settings.timeout_s
        """Seconds that a wait may take before it fails."""
        self.has_other_nodes = agreement.num_nodes > 1
        """Whether some workers of the session are on other nodes."""
        self.is_newcomer = is_newcomer
        """Whether this worker has the place of a lost one, and does not take part yet."""
        self._has_counted_staging = False  # a newcomer has none, but counts their registrations
        self._boundary: StepBoundary | None = None
        self._on_entry: list[Callable[[], object]] = []
        self.members = Members({*ranks, *agreement.ranks_elsewhere} - {*vacant})
        """The workers of the session that go on."""
        self.may_lose_workers = settings.least_workers > 0
        """Whether the session goes on without lost workers."""
        num_ranks = len(ranks) + len(agreement.ranks_elsewhere)
        self.num_ranks = num_ranks if self.may_lose_workers and self.has_other_nodes else 0
        """Workers of all nodes, if there are several and they go on without lost ones; else 0."""
        self.table = table
        self.emulation = emulation
        local_device = table.local_device(number)
        self._routing = RoutingTable(
            lat_proxy=local_device, bw_proxy=local_device, threshold_bytes=settings.routing_threshold_bytes
        )
        self.shard_bytes = settings.shard_bytes or DEFAULT_SHARD_BYTES
        """Partition threshold of later registrations."""
        self._algorithms = algorithms_of(settings, table, num_nodes=agreement.num_nodes)
        self._routable = routable_algorithms(settings, table, num_nodes=agreement.num_nodes)
        self._plans_shards = not settings.shard_bytes and measures_gpu_links(
            settings, table, num_nodes=agreement.num_nodes
        )
        self._staging: TensorGroup | None = None
        self.algorithm_choice: AlgorithmChoice | None = None
        """The choice among this session's algorithms; None until one is needed."""
        self._is_closed = False
        self._pid = os.getpid()
        self._ranks_elsewhere = agreement.ranks_elsewhere
        self.names = names
        """Descriptions of this node's workers, by client number."""
        self.warn_after_s = settings.warn_after_s
        """Seconds that a wait may take before it is logged; 0 disables logging."""
        self._metrics_reader = MetricsReader.of_segment(metrics_fd, len(connections), ranks)
        self.metrics = MetricsWriter(self._metrics_reader.worker(self.rank))
        """This worker's metrics."""
        self._num_waits = 0
        self.explain_worker: Callable[[str], str] = lambda name: ""
        """Describes the current activity of a worker of this node, given by its name; "" if unknown."""
        self._native = self._open_native(segment_fd, doorbells_fd, epochs_fd, pace)
        self._failure_detector = self._open_failure_detector(doorbells_fd, fate_of_device, kill_silent)
        self._requests = Requests(self.rank, settings.timeout_s, self._failure_detector, self.metrics)
        self._storage = ParameterStorage(connections, self._requests, replicas=settings.replicas)
        self._groups = RegisteredGroups(
            self._native, connections, agreement, self._requests, self._failure_detector, self.metrics
        )
        if self.warn_after_s:
            self._log_long_waits()

    def _open_native(self, segment_fd: int, doorbells_fd: int, epochs_fd: int, pace: Pace) -> _native.Client:
        return _native.Client(
            num_devices=len(self._connections),
            segment_fd=segment_fd,
            doorbells_fd=doorbells_fd,
            watch_fds=[connection.fileno() for connection in self._connections],
            spin_us=pace.spin_us,
            bytes_per_ring=pace.bytes_per_ring,
            is_emulated=self.emulation is not None,
            heartbeat_ms=heartbeat_limit_ms(self._settings.heartbeat_s),
            metrics=self.metrics.native,
            epochs_fd=epochs_fd,
            is_newcomer=self.is_newcomer,
        )

    def _open_failure_detector(
        self, doorbells_fd: int, fate_of_device: FateOfDevice, kill_silent: KillSilent
    ) -> FailureDetector:
        # It lives as long as this object and must not keep it alive.
        has_gpu_tensors = weakref.WeakMethod(self._has_gpu_tensors)
        return FailureDetector(
            rank=self.rank,
            connections=self._connections,
            doorbells_fd=doorbells_fd,
            heartbeat_s=self._settings.heartbeat_s,
            fate_of_device=fate_of_device,
            kill_silent=kill_silent,
            has_gpu_tensors=lambda: (has_any := has_gpu_tensors()) is not None and has_any(),
            replicas=self._settings.replicas,
        )

    def _log_long_waits(self) -> None:
        # The data path lives as long as this object and must not keep it alive.
        tell_late = weakref.WeakMethod(self.tell_late)
        self._native.tell_of_lateness(
            self.warn_after_s, lambda waited_s: tell(waited_s) if (tell := tell_late()) else None
        )

    def _has_gpu_tensors(self) -> bool:
        return any(group.gpu is not None or group.is_on_gpu for group in self._groups)

    def read_metrics(self) -> Metrics:
        """The metrics of this node's workers and memory devices."""
        return self._metrics_reader.read()

    @property
    def is_closed(self) -> bool:
        """Whether close() was called."""
        return self._is_closed

    def describe_device(self, device: int) -> str:
        """A memory device of this node, in words."""
        return f"md{device} (pid {self._connections[device].pid})"

    def device_pid(self, device: int) -> int:
        """Process id of a memory device of this node."""
        return self._connections[device].pid

    def device_pids(self) -> list[int]:
        """Process ids of all memory devices of this node."""
        return [connection.pid for connection in self._connections]

    def describe_progress(self) -> str:
        """The progress of a tensor that all workers of this node have pushed, in words."""
        if not self._ranks_elsewhere:
            return "being reduced"
        members = {*self.members.ranks}
        here, elsewhere = (
            ", ".join(str(rank) for rank in ranks if rank in members)
            for ranks in (self.ranks, self._ranks_elsewhere)
        )
        return f"pushed by worker(s) {here}; not pushed by, or not received from, {elsewhere}"

    def adopt_plan(self, table: RoutingTable, shard_bytes: int) -> None:
        """Sets the routes and shard size of later registrations.

        Args:
            table: This worker's routing table.
            shard_bytes: Partition threshold in bytes, the same on every worker.
        """
        self._routing = table
        self.shard_bytes = shard_bytes

    def register(
        self,
        name: str,
        specs: Sequence[TensorSpec],
        *,
        state_names: Sequence[str] | None = None,
        are_gradients: bool = False,
        is_open: bool = False,
        on_host: bool = False,
        window_bytes: int = 0,
        gpu: str = "",
        memory: WorkerMemory = EAGER,
    ) -> TensorGroup:
        """Registers tensors; every worker must do so with the same arguments.

        Args:
            name: Name of the tensor group.
            specs: One for each tensor.
            state_names: States that a remote optimizer keeps for each parameter; None without such an optimizer.
            are_gradients: Whether means may be compressed between nodes; always with an optimizer.
            is_open: Whether workers see each other's slots. TensorGroup.use_direct_allreduce() needs it.
            on_host: Whether the tensors lie in the host's memory even if memory devices own GPUs.
            window_bytes: With an optimizer, the size of the slot window; 0 gives each tensor its own slot.
            gpu: UUID of the GPU that holds this worker's tensors; "" for none. If its slots lie on the same GPU, the
                worker sees them there (TensorGroup.is_on_gpu). May differ between workers.
            memory: Whether this worker reserves the host's memory for the tensors later. May differ between workers.

        Raises:
            SchemaMismatchError: If another worker registered different tensors; names the first difference.
            OutOfDeviceMemoryError: If the memory devices cannot hold the tensors.
            ValueError: If the session cannot run an optimizer in its memory devices.
        """
        large_algorithm, shard_bytes = DIRECT, self.shard_bytes
        routes: tuple[RoutingTable, ...] = ()
        # Only one algorithm serves optimizers, and tensors in a slot window have no routes.
        may_choose = state_names is None or ((self._routable or self._plans_shards) and not window_bytes)
        if not on_host and may_choose and (choice := self._choose_way(gpu)) is not None:
            way = choice.fastest("" if state_names is None else DIRECT)
            large_algorithm = way.algorithm
            routes = choice.routes_of(way)
            if choice.shard_size is not None:
                shard_bytes = choice.shard_size.nbytes
        schema = GroupSchema(
            name=name,
            specs=tuple(specs),
            shard_bytes=shard_bytes,
            gather_bytes=self._settings.gather_bytes,
            algorithm=self._algorithm_of(on_host=on_host),
            large_algorithm=large_algorithm,
            state_names=None if state_names is None else tuple(state_names),
            is_open=is_open,
            on_host=on_host,
            window_bytes=window_bytes,
            routes=routes,
            are_gradients=are_gradients or state_names is not None,
        )
        return self._register_along_routes(schema, gpu, memory)

    def _register_along_routes(self, schema: GroupSchema, gpu: str, memory: WorkerMemory) -> TensorGroup:
        """Registers a group; falls back to simpler routes, or none, if memory devices refuse its routes.

        Some memory devices may not reach all pieces of slots, or may lack room for more pieces than the trial had.
        """
        of_one_proxy = tuple(table.to_one_proxy() for table in schema.routes)
        for routes in dict.fromkeys((schema.routes, of_one_proxy)):
            try:
                return self._register(replace(schema, routes=routes), gpu, memory)
            except CoarseError as error:
                if not routes or not is_refusal(error):
                    raise
                what = (
                    f"{schema.name}: memory devices refuse the routes of its tensors; trying simpler routes"
                )
                logger.warning("%s: %s", what, error)
                self.metrics.add("coarse_refused_routes_total")
        return self._register(replace(schema, routes=()), gpu, memory)

    def _algorithm_of(self, *, on_host: bool) -> str:
        """The algorithm that reduces a group."""
        algorithm = self._settings.sync_algorithm
        # RING and NCCL reduce between GPUs, so their tensors lie there.
        if algorithm in (RING, NCCL) and on_host and self.table.is_on_gpus:
            return "auto" if self.emulation is None else EXCHANGE
        return algorithm

    def _choose_way(self, gpu: str) -> AlgorithmChoice | None:
        """How tensors on GPUs are reduced; None if only one way exists.

        The first call may measure the ways, so all workers must make it together.
        """
        if self.algorithm_choice is None:
            if len(self._algorithms) == 1 and not self._routable and not self._plans_shards:
                return None
            from coarse.client.gpu.algorithm_choice import Way, measure_ways

            ways = [Way(algorithm) for algorithm in self._algorithms if algorithm != NCCL or self._has_nccl]
            ways += [Way(algorithm, is_routed=True) for algorithm in self._routable]
            ways = ways or [Way(DIRECT)]  # one memory device has nobody to reduce with
            self.algorithm_choice = measure_ways(self, ways, gpu, self._settings)
            if self.rank == self.ranks[0]:
                for line in self.algorithm_choice.describe():
                    logger.info("[w%d] %s", self.rank, line)
        return self.algorithm_choice

    def register_trial(
        self,
        name: str,
        spec: TensorSpec,
        algorithm: str,
        gpu: str,
        routes: tuple[RoutingTable, ...] = (),
        *,
        shard_bytes: int = 0,
        is_for_gpu: bool = False,
    ) -> TensorGroup:
        """Like register(), for one tensor and one algorithm, regardless of the settings.

        Args:
            name: Name of the tensor group.
            spec: The tensor.
            algorithm: The algorithm that reduces it.
            gpu: UUID of the GPU that holds this worker's tensor.
            routes: As in GroupSchema.
            shard_bytes: Partition threshold; 0 for that of later registrations.
            is_for_gpu: The slots are for that GPU alone, and the tensor is never pushed. A worker gets a group
                without slots if it has no GPU or its GPU does not reach them.
        """
        schema = GroupSchema(
            name=name,
            specs=(spec,),
            shard_bytes=shard_bytes or self.shard_bytes,
            gather_bytes=self._settings.gather_bytes,
            algorithm=algorithm,
            routes=routes,
        )
        return self._register(schema, gpu, is_for_gpu=is_for_gpu)

    def cannot_move_slots(self, group: TensorGroup) -> str:
        """Why a group's slots cannot follow the links between GPUs; "" if they can. The same on every worker."""
        if not self._routable:
            return "its slots have no choice between links"
        if (algorithm := group.schema.large_algorithm) not in self._routable:
            return f"{algorithm} takes each contribution from the worker's own memory device"
        return group.needs_memory_devices()

    def move_slots(self, group: TensorGroup, gpu: str) -> bool:
        """Measures the links between GPUs again, and moves a group's slots if that saves a tenth of the time.

        Every worker calls it between the same two steps, when it has pulled all tensors. Results stay the same.

        Args:
            group: A group with cannot_move_slots() == "".
            gpu: GPU of this worker's tensors, as for register().

        Returns:
            Whether the slots lie elsewhere now; the same on every worker.

        Raises:
            ValueError: On every worker, if the GPU of one does not copy its tensors to another GPU.
        """
        from coarse.client.gpu.algorithm_choice import better_routes, is_any

        if is_any(self, group.gpu is None or not group.is_distant):
            raise ValueError("not every worker has its tensors on a GPU, and its slots on another one")
        routes = better_routes(self, gpu, self._settings, group.schema)
        if not routes:
            return False
        try:
            moved = self._register(replace(group.schema, routes=routes), gpu)
        except CoarseError as error:
            if not is_refusal(error):
                raise
            logger.warning("%s: memory devices refuse the new routes of its tensors: %s", group.name, error)
            self.metrics.add("coarse_refused_routes_total")
            return False
        if is_any(self, not moved.is_distant):  # its tensors would have to become its slots
            moved.close()
            return False
        self._groups.replace_slots(group, moved)
        return True

    def cannot_share_parameters(self, gpu: str) -> str:
        """Why this worker cannot use parameters in the home device; "" if it can.

        Args:
            gpu: UUID of the model's GPU; "" for the host.
        """
        if not self.table.is_on_gpus or gpu:
            return ""
        place = self.table.devices[HOME_DEVICE].memory.place
        return f"the parameters would lie on cuda:{place}, but the model is in the host's memory"

    def open_node_barrier(self, name: str, most_numbers: int) -> NodeBarrier:
        """Opens a node barrier; every worker must call it with the same arguments.

        Args:
            name: Name of the barrier.
            most_numbers: Largest count of numbers to compare at once.
        """
        schema = node_barrier_schema(name, most_numbers, is_emulated=self.emulation is not None)
        return NodeBarrier(self._register(schema))

    def open_async_reducer(self) -> AsyncReducer:
        """Opens a reducer, after which tensors may only be pushed and pulled by name; the caller closes it."""
        self._check_usable()
        return AsyncReducer(self, self._native)

    def all_reduce(
        self, address: int, num_elements: int, dtype: str, op: str, *, present: bool = True
    ) -> None:
        """Reduces an unregistered buffer in place.

        Args:
            address: Address of the first element in this process; the buffer is contiguous.
            num_elements: Length of the buffer, the same on every worker.
            dtype, op: As in TensorSpec.
            present: Whether this worker contributes; it receives the result either way.
        """
        self._check_usable()
        if num_elements == 0:
            return
        if self.is_newcomer:
            return self._count_buffers()
        group = self._staging_group()
        status = self._native.all_reduce(
            group.id, address, num_elements, DTYPE_NUMBERS[dtype], OP_NUMBERS[op], present, self.timeout_s
        )
        self.check(status, lambda: f"an all-reduce of {num_elements} x {dtype}")

    def _count_buffers(self) -> None:
        """Counts the buffers as the other workers do in the same call: they give them a group number."""
        if not self._has_counted_staging:
            self._has_counted_staging = True
            self._groups.take_id()

    def open_boundary(self, next_group: int = 0) -> None:
        """Opens the boundary of training steps; every worker calls it, before it registers tensors.

        Args:
            next_group: For a newcomer, the number that the others have given the boundary.
        """
        self._groups.next_id = max(self._groups.next_id, next_group)
        group = self._register(boundary_schema())
        self._boundary = StepBoundary(
            self._native,
            group,
            self._groups,
            self._storage,
            self.members,
            self.ranks,
            self.number,
            lambda: self._staging,
        )

    @property
    def next_group(self) -> int:
        """Number of the next group that a worker registers."""
        return self._groups.next_id

    @property
    def num_begun_steps(self) -> int:
        """Calls of begin_step() by all members."""
        return 0 if self._boundary is None else self._boundary.num_steps

    def begin_step(self) -> frozenset[int]:
        """Crosses the boundary between two steps; every member calls it between the same two pushes.

        Returns:
            Ranks of the newcomers that take part from now on; the same on every worker.
        """
        self._check_usable()
        self.join_training()
        if self._boundary is None:
            return frozenset()
        entered = self._boundary.cross()
        self._groups.epoch = self._boundary.epoch
        return entered

    def join_training(self) -> None:
        """Returns when this worker is a member: at once unless it is a newcomer."""
        if not self.is_newcomer:
            return
        assert self._boundary is not None
        try:
            self._boundary.enter(self._connections, self.check_others, self._open_buffers)
        except (WorkerLostError, MemoryDeviceLostError) as error:
            raise self._failure_detector.explain(error) from error
        self._groups.epoch = self._boundary.epoch
        self.is_newcomer = False
        for callback in self._on_entry:
            callback()

    @property
    def entering(self) -> frozenset[int]:
        """StepBoundary.newcomers."""
        return frozenset() if self._boundary is None else self._boundary.newcomers

    def on_entry(self, callback: Callable[[], object]) -> None:
        """Calls back when this newcomer is a member, before its first step."""
        self._on_entry.append(callback)

    def _open_buffers(self, group: int) -> None:
        """Registers the buffers that the others use in all_reduce()."""
        self._groups.next_id = group
        self._staging = self._register(staging_schema(is_emulated=False))

    def store(self, key: str, *pieces: memoryview[Any]) -> int:
        """ParameterStorage.store()."""
        self._check_usable()
        return self._storage.store(key, *pieces)

    def load(self, key: str) -> StoredValue:
        """ParameterStorage.load()."""
        self._check_usable()
        return self._storage.load(key)

    def snapshot_stored(self) -> StorageSnapshot:
        """ParameterStorage.snapshot()."""
        self._check_usable()
        return self._storage.snapshot()

    def tell_home(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a message to the home device; the caller closes the descriptors."""
        self._check_usable()
        self._connections[HOME_DEVICE].send(message, fds)

    def tell_devices(self, message: Message) -> None:
        """Sends a message to all memory devices."""
        self._check_usable()
        send_to_all(self._connections, message)

    def ask_home(self, message: Message, kind: str, about: str) -> Received:
        """Sends a message to the home device and waits for its answer.

        Args:
            message: The message.
            kind: Type of the answer.
            about: Subject of the request, for error messages.
        """
        self.tell_home(message)
        return self._requests.wait_for(self._connections[HOME_DEVICE], kind, about)

    def open_probes(self, largest_bytes: int) -> LinkProbes:
        """Allocates memory for probes of up to `largest_bytes`; every worker must call it with the same argument.

        Raises:
            OutOfDeviceMemoryError: If the memory devices have too little memory.
        """
        group = self._register(probe_schema(largest_bytes, on_host=self.emulation is not None))
        dilation = 1.0 if self.emulation is None else self.emulation.time_dilation
        return LinkProbes(self, self._native, group, len(self._connections), time_dilation=dilation)

    @property
    def routing(self) -> RoutingTable:
        """The routes of shards to memory devices."""
        return self._routing

    def adopt_routing(self, table: RoutingTable) -> None:
        """Routes every shard by `table` from its next push on. Results stay the same.

        Raises:
            ValueError: If the table names a memory device that does not exist, or, with rings over emulated links,
                another one than the worker's own.
        """
        self._check_usable()
        own = self.table.local_device(self.number)
        leaves_own = {table.lat_proxy, table.bw_proxy, *table.turns} != {own}
        if leaves_own and self.emulation is not None and self._settings.sync_algorithm == RING:
            raise ValueError(
                f"{table}: a ring takes the contributions of worker {self.rank} from md{own} only"
            )
        if max(table.lat_proxy, table.bw_proxy) >= self.table.num_devices:
            raise ValueError(
                f"{table} names a memory device that does not exist; the session has {self.table.num_devices}"
            )
        self._routing = table
        self._groups.route(table)

    def release_buffers(self) -> None:
        """Releases the memory that all_reduce() keeps for its next call, when every worker has called this."""
        self._has_counted_staging = False
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def check(
        self, status: _native.WaitStatus, describe: Callable[[], str], *, timeout_s: float = 0.0
    ) -> None:
        """Raises the error that a native call's status stands for, unless the call succeeded.

        Args:
            status: Return value of the native call.
            describe: Describes the object of the wait, for the error message.
            timeout_s: Timeout of the call; 0 stands for the session's timeout.
        """
        self._num_waits += 1
        if status == _native.WaitStatus.DONE:
            return
        if status == _native.WaitStatus.FORKED:
            raise ForkedSessionError(
                f"worker {self.rank}: the session was opened by process {self._pid} but is used in its fork "
                f"{os.getpid()}. Use the fork only to load data, or start the process with the spawn method."
            )
        if status == _native.WaitStatus.TIMED_OUT:
            waited_s = timeout_s or self.timeout_s
            raise SyncTimeoutError(
                f"worker {self.rank}: waited {waited_s:.1f} s for {describe()}{self._advice(self._late_clients())}"
            )
        if status == _native.WaitStatus.NO_CONTRIBUTION:
            raise WorkerLostError(
                f"worker {self.rank}: nobody has contributed to {describe()}: the worker that had to is lost. "
                "Let one of `session.members` do it, or start the job again"
            )
        is_silent = status == _native.WaitStatus.DEVICE_SILENT
        raise self._failure_detector.explain(
            SilentDeviceError(self._native.lost_device) if is_silent else None
        )

    def check_others(self) -> None:
        """Raises if a worker or memory device is lost, like a wait for a tensor."""
        self._check_usable()
        self.check(self._native.check_peers(), str)

    def close(self, *, is_finished: bool = True, leaves_early: bool = False) -> None:
        """Leaves the memory devices. Idempotent.

        Args:
            is_finished: As for Session.close().
            leaves_early: Whether the others go on, and this worker pushes nothing more.
        """
        if self._is_closed:
            return
        for group in self._groups:
            group.close_gpu_transfers()  # they read the connections
        self._is_closed = True
        if os.getpid() == self._pid:
            bye: Message = {"type": "bye", "is_finished": is_finished, "leaves_early": leaves_early}
            send_to_all(self._connections, bye)
        for connection in self._connections:
            connection.close()
        for group in self._groups:
            group.close()
        self._staging = None

    # ---- for tensor groups ----

    def release(self, group: int) -> None:
        """Releases a tensor group; its memory is freed when every worker has released it."""
        self._groups.release(group, tells_devices=not self._is_closed and os.getpid() == self._pid)

    # ---- private ----

    def _late_clients(self) -> list[int]:
        """Workers of this node that have not pushed a tensor for whose result this worker waits."""
        return sorted({client for group in self._groups for client in group.late_clients()} - {self.number})

    def _advice(self, late: Sequence[int], *, asks_first: bool = False) -> str:
        """Where late workers are, with advice, as the end of a sentence; `asks_first` asks the first one."""
        if stopped := self._stopped_devices():  # pushes to it look like pushes that are missing
            return stopped
        if not late:
            return ""
        elsewhere = [
            f"{self.names[client]} is itself waiting for {awaited}"
            for client in late
            if (awaited := next(filter(None, (group.awaited_by(client) for group in self._groups)), ""))
        ]
        if elsewhere:
            return (
                f". {'; '.join(elsewhere)}, which worker {self.rank} has not pushed: the workers are at "
                f"different points of the training. If one of them ran out of data first, {_EQUAL_DATA}"
            )
        names = " and ".join(self.names[client] for client in late)
        if asks_first and (place := self.explain_worker(self.names[late[0]])):
            return (
                f". {self.names[late[0]]} {place} (all stacks: coarse status --stacks); if it ran out of data "
                f"first, {_EQUAL_DATA}"
            )
        return f". Inspect {names} (coarse status --stacks); if it ran out of data first, {_EQUAL_DATA}"

    @property
    def num_steps(self) -> int:
        """Finished steps, as TensorGroup.num_steps, of the group with the most, also if it is released."""
        return self._groups.num_steps

    def count_steps(self) -> int:
        """Finished steps; those that native code has timed if no tensor group is pulled as a whole (TensorFlow)."""
        timed = "coarse_step_seconds_count"
        return self.num_steps or int(self.read_metrics().total(timed, worker=str(self.rank)))

    @property
    def num_waits(self) -> int:
        """Grows with every wait that ends."""
        return self._num_waits + sum(group.num_pulls for group in self._groups)

    def _stopped_devices(self) -> str:
        """The memory devices of this node that are stopped, as the end of a sentence; "" if none is."""
        stopped = [
            f"md{connection.device} (pid {connection.pid}): {describe_process(connection.pid)}"
            for connection in self._connections
            if is_stopped(connection.pid)
        ]
        return f". {'; '.join(stopped)}" if stopped else ""

    def describe_wait(self) -> str:
        """Pushed tensors without a result, and the workers that have not pushed them; from any thread."""
        return "; ".join(group.describe_pending() for group in self._groups if group.is_pending())

    def tell_late(self, waited_s: float) -> None:
        """Logs the workers that this worker waits for, and what they do, in the waiting thread or another one."""
        logger.warning(
            "[w%d] has waited %.0f s for %s%s. The wait ends with an error after %g s (COARSE_TIMEOUT_S)",
            *(
                self.rank,
                waited_s,
                self.describe_wait() or "other workers",
                self._advice(self._late_clients(), asks_first=True),
                self.timeout_s,
            ),
        )

    def _register(
        self, schema: GroupSchema, gpu: str = "", memory: WorkerMemory = EAGER, *, is_for_gpu: bool = False
    ) -> TensorGroup:
        self._check_usable()
        return self._groups.register(self, schema, gpu, memory, is_for_gpu=is_for_gpu)

    def _staging_group(self) -> TensorGroup:
        if self._staging is None:
            self._staging = self._register(staging_schema(is_emulated=self.emulation is not None))
        return self._staging

    def _check_usable(self) -> None:
        if self._failure_detector.known is not None:
            raise self._failure_detector.known
        if self._is_closed:
            raise SessionClosedError(f"worker {self.rank}: the session is closed")
        if os.getpid() != self._pid:
            self.check(_native.WaitStatus.FORKED, str)

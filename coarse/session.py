"""A session connects the workers and memory devices of one job."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from coarse.arrays import AnyArray, HostValues
from coarse.client.async_reducer import AsyncReducer
from coarse.client.client import Client
from coarse.client.link_probes import LinkProbes
from coarse.client.members import WorldChange
from coarse.client.memory.parameter_storage import StorageSnapshot
from coarse.client.memory.stored_value import StoredValue
from coarse.client.single_worker import SingleWorkerClient, SingleWorkerTensorGroup
from coarse.client.tensor_group import TensorGroup
from coarse.client.termination_notice import TerminationNotice
from coarse.client.worker_status import AnsweringWorker, answer_as_worker
from coarse.emulation.emulated_session import EmulatedSession
from coarse.env import Attempt, WorkerIdentity, is_of_torchrun, notes_pipe
from coarse.errors import SessionClosedError
from coarse.failpoints import Failpoints, parse_failpoints
from coarse.kernels import _native
from coarse.machine.partition_table import PartitionTable
from coarse.metrics.reporter import MetricsReporter, WriteScalar
from coarse.metrics.values import Metrics
from coarse.metrics.writer import MetricsWriter
from coarse.profiler.link_plan import plan_links
from coarse.profiler.routing import RoutingTable
from coarse.profiler.start import OFF, FoundProfile
from coarse.rendezvous.workers import NodeMap, PeerWatch, gather_workers
from coarse.schema import UPDATABLE_DTYPES, TensorSpec
from coarse.security.node_ports import NodePorts
from coarse.session_parts.checks import (
    check_emulated_nodes,
    check_losses,
    check_nodes,
    check_ports,
    check_solo,
    check_specs,
    reducible,
    settings_for_losses,
    settings_for_nodes,
)
from coarse.settings import Settings
from coarse.startup.device_connections import Joining, NodeDevices, agree_on_profile, connect, provide_devices
from coarse.startup.device_processes import DeviceProcesses
from coarse.startup.newcomer import Invitation, enter_session
from coarse.startup.node_address import try_address_of_this_node
from coarse.startup.persistent_devices import Keeping
from coarse.status.address import job_id
from coarse.status.launcher_notes import tell_launcher
from coarse.status.responder import Report
from coarse.store import Store
from coarse.timeline import recorder
from coarse.timeline.part_files import WORKER, Process
from coarse.tuning.step_planning import StepPlanning
from coarse.wire.algorithms import describe_algorithm, describe_compression
from coarse.wire.registration import EAGER, WorkerMemory
from coarse.worker_state import WorkerState, checked

if TYPE_CHECKING:  # slow to import
    from coarse.metrics.endpoint import MetricsEndpoint
    from coarse.profiler.profile import Profile

logger = logging.getLogger(__name__)

_DEVICE_EXIT_TIMEOUT_S = 0.5


AnyTensorGroup: TypeAlias = TensorGroup | SingleWorkerTensorGroup
"""The tensors of one registration, in a job of one or several workers."""


class Session:
    """One worker's membership in a job.

    Session.join() creates it. It lives until close() or the end of a `with` block. Use it from one thread at a time;
    several sessions can live in one process.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        settings: Settings,
        client: Client | SingleWorkerClient,
        node: NodeDevices | None,
        attempt: Attempt,
    ) -> None:
        self.identity = identity
        self.settings = settings
        self.failpoints = Failpoints(
            parse_failpoints(settings.failpoints),
            rank=identity.rank,
            attempt=attempt.number,
            device_pid=client.device_pid if isinstance(client, Client) else None,
        )
        self._client: Client | SingleWorkerClient | None = client
        self._node = node
        self._decisions: tuple[str, ...] = ()
        self._planning: StepPlanning | None = None
        self._profile: Profile | None = None
        self._pid = os.getpid()
        self._endpoint: MetricsEndpoint | None = None
        self.invitation: Invitation | None = None
        """How a new worker enters this session in the place of a lost one; None if it takes none."""
        self.worker_state: Mapping[str, WorkerState] = {}
        """The `state` of join_training()."""
        self._on_leave: list[Callable[[], object]] = []
        client.metrics.set("coarse_world_size", identity.world_size)
        client.metrics.set("coarse_restarts", attempt.number)
        self._answering: AnsweringWorker | None = None
        this = weakref.ref(self)  # the notice must not keep it alive
        self._notice = TerminationNotice(
            lambda: (session := this()) is not None and session._may_leave,
            lambda: tell_launcher(notes_pipe(), {"is_leaving": identity.rank}),
        )

    @classmethod
    def join(
        cls,
        *,
        identity: WorkerIdentity,
        store: Store,
        settings: Settings | None = None,
        name: str = "session",
        attempt: Attempt | None = None,
    ) -> Session:
        """Joins the job; returns when all workers and memory devices are ready.

        The first worker of each node starts the memory devices of that node. They end when its last worker has left.
        With `keep_devices` they stay alive for a limited time if workers were lost, and the workers of the next
        attempt join them.

        Args:
            identity: Rank and node of this worker.
            store: Where the job's workers find each other. Its keys belong to this session alone.
            settings: The same on every worker; read from the environment if not given.
            name: Distinguishes the sessions of one job; the same in every attempt.
            attempt: The job's attempt; read from the environment if not given.

        Raises:
            RendezvousError: If workers are missing or have the same rank; if nodes cannot reach each other; if a job
                of several nodes uses the algorithm "ring" or keeps its memory devices; or if the number of workers
                or memory devices differs from the previous attempt's.
            WorkerLostError: If another worker dies during the start.
            OutOfDeviceMemoryError, MemoryDeviceLostError: If memory devices cannot start.
            ProfileError: If the file that COARSE_PROFILE names is not a profile of these links.
        """
        settings = settings or Settings.from_environment()
        attempt = attempt or Attempt.from_environment()
        answering = answer_as_worker(attempt.job, identity.rank)
        try:
            session = cls._join(identity, store, settings, name, attempt)
        except BaseException:
            answering.close()
            raise
        session._answering = answering
        if isinstance(session._client, Client):
            answering.follow(session._client, weakref.WeakMethod(session._describe_plan))
            session._tell_decisions(attempt.job)
            session._heed_notices()
        weakref.finalize(session, answering.close)  # for sessions that nobody closes
        return session

    @classmethod
    def enter(
        cls,
        *,
        identity: WorkerIdentity,
        invitation: Invitation,
        settings: Settings | None = None,
        attempt: Attempt | None = None,
    ) -> Session:
        """Joins a running job in the place of a lost worker.

        Until join_training() returns, this worker exchanges nothing with the others: it builds models and optimizers
        as they have done, and collective calls return as in a job of this worker alone.

        Args:
            identity: Rank of the lost worker.
            invitation: What the session's first worker has told its launcher.
            settings, attempt: As for join().

        Raises:
            RendezvousError: If the place does not become vacant.
            MemoryDeviceLostError, WorkerLostError: If the job has ended.
        """
        settings = settings_for_losses(settings or Settings.from_environment())
        attempt = attempt or Attempt.from_environment()
        answering = answer_as_worker(attempt.job, identity.rank)
        try:
            _record_timeline(settings, identity, attempt, node=0)
            client, node = enter_session(identity, settings, invitation)
        except BaseException:
            answering.close()
            raise
        session = cls(identity, settings, client, node, attempt)
        session.invitation = invitation
        client.adopt_plan(client.routing, invitation.shard_bytes)
        client.open_boundary(invitation.next_group)
        client.on_entry(lambda: tell_launcher(notes_pipe(), {"entered": identity.rank}))
        heed_notices = weakref.WeakMethod(session._heed_notices)
        client.on_entry(lambda: (heed := heed_notices()) is not None and heed())
        session._answering = answering
        answering.follow(client, weakref.WeakMethod(session._describe_plan))
        weakref.finalize(session, answering.close)
        return session

    @classmethod
    def _join(
        cls, identity: WorkerIdentity, store: Store, settings: Settings, name: str, attempt: Attempt
    ) -> Session:
        if identity.world_size == 1:
            check_solo(settings)
            _record_timeline(settings, identity, attempt, node=0)
            session = cls(identity, settings, SingleWorkerClient(), None, attempt)
            session._serve_metrics()
            return session
        has_other_nodes = identity.local_world_size < identity.world_size or bool(settings.node)
        reached_at = try_address_of_this_node(settings) if has_other_nodes else ""
        ports = NodePorts.parse(settings.node_ports)
        with PeerWatch(identity, settings.node, store=store, reached_at=reached_at, ports=ports) as watch:
            addresses = gather_workers(
                identity, store, timeout_s=settings.timeout_s, watch=watch, node=settings.node
            )
            nodes = NodeMap.of_addresses(addresses)
            with watch.telling():
                check_nodes(settings, nodes.num_nodes)
                check_ports(settings, nodes, nodes.node_of(identity.rank))
                watch.require_presence()
                check_emulated_nodes(settings, nodes)
                check_losses(
                    settings,
                    num_workers=identity.world_size,
                    num_nodes=nodes.num_nodes,
                    is_of_torchrun=is_of_torchrun(),
                )
                settings = settings_for_losses(settings_for_nodes(settings, nodes.num_nodes))
                if settings.max_workers:
                    nodes = nodes.with_places(settings.max_workers)
                joining = Joining(
                    identity=identity,
                    store=store,
                    settings=settings,
                    nodes=nodes,
                    watch=watch,
                    keeping=Keeping(session=name, attempt=attempt) if settings.keep_devices else None,
                )
                # First, so that a full disk ends the start of all workers, while they wait for this one.
                _record_timeline(settings, identity, attempt, node=joining.node)
            client, node, found = _come_together(joining)
            session = cls(identity, settings, client, node, attempt)
            try:
                with watch.telling():
                    session._plan_links(client, node, found)
                    if settings.replaces_workers:
                        session._invite_newcomers(client, node)
            except BaseException:
                session.close()
                raise
        return session

    def register(
        self,
        name: str,
        specs: Sequence[TensorSpec],
        *,
        are_gradients: bool = False,
        on_host: bool = False,
        gpu: str = "",
        memory: WorkerMemory = EAGER,
    ) -> AnyTensorGroup:
        """Registers tensors with the memory devices; every worker calls it with the same arguments.

        Args:
            name: Name of the tensor group.
            specs: One for each tensor.
            are_gradients: Whether COARSE_NODE_COMPRESSION may round float32 means on their way between nodes.
            on_host, gpu, memory: As for Client.register().

        Raises:
            SchemaMismatchError: If workers pass different tensors; names the first difference.
            OutOfDeviceMemoryError: If the memory devices cannot hold the tensors.
            ValueError: If `specs` is empty or contains a name twice.
        """
        check_specs(name, specs)
        client = self._open()
        if not isinstance(client, Client):
            return client.register(name, specs)
        planning = self._planning
        is_open = planning is not None and planning.may_reduce_on_host
        group = client.register(
            name,
            specs,
            are_gradients=are_gradients,
            is_open=is_open,
            on_host=on_host,
            gpu=gpu,
            memory=memory,
        )
        if planning is not None and not on_host:
            planning.watch(self, group, gpu)
        return group

    def register_trial(self, name: str, specs: Sequence[TensorSpec], gpu: str) -> TensorGroup:
        """Like register(), but planning ignores the steps of these tensors."""
        return self._linked().register(name, specs, gpu=gpu)

    def cannot_move_slots(self, group: TensorGroup) -> str:
        """Client.cannot_move_slots()."""
        return self._linked().cannot_move_slots(group)

    def move_slots(self, group: TensorGroup, gpu: str) -> bool:
        """Client.move_slots()."""
        return self._linked().move_slots(group, gpu)

    def cannot_update(self, gpu: str = "") -> str:
        """Why the memory devices of this session cannot run an optimizer; "" if they can.

        Args:
            gpu: GPU of the parameters, as for Client.register().
        """
        if not isinstance(self._open(), Client):
            return "a job of one worker has no memory devices"
        if self.settings.machine:
            return f"updates are not paced to the links of {self.settings.machine}"
        if self.settings.sync_algorithm not in ("auto", "direct", "gather"):
            return f"gradients are reduced by {self.settings.sync_algorithm}, as if memories were distinct"
        return self._linked().cannot_share_parameters(gpu)

    def cannot_reduce_rows(self) -> str:
        """Why the memory devices of this session cannot reduce sparse gradients; "" if they can."""
        if len(self.node_workers) < self.identity.world_size:
            return "the job has several nodes, each with its own memory devices"
        return self.cannot_update()

    def register_parameters(
        self,
        name: str,
        specs: Sequence[TensorSpec],
        *,
        state_names: Sequence[str],
        window_bytes: int = 0,
        gpu: str = "",
        memory: WorkerMemory = EAGER,
    ) -> TensorGroup:
        """Like register(), for gradients whose parameters and optimizer states also lie in the memory devices.

        Args:
            name: As for register().
            specs: One for each gradient: a mean, of a dtype in UPDATABLE_DTYPES.
            state_names: The optimizer states of each parameter, in the order of its update rule.
            window_bytes: Size of a slot window, which the tensors use in turn, from the last to the first. A tensor
                enters its slot when all earlier tensors that overlap it have been pulled. 0 gives each tensor its
                own slot.
            gpu, memory: As for Client.register().

        Raises:
            ValueError: Also if cannot_update() returns a reason.
        """
        check_specs(name, specs)
        if reason := self.cannot_update(gpu):
            raise ValueError(f"{name}: the optimizer cannot run in memory devices: {reason}")
        for spec in specs:
            if spec.dtype not in UPDATABLE_DTYPES or spec.op != "mean":
                raise ValueError(
                    f"tensor {spec.name!r}: only means of {', '.join(UPDATABLE_DTYPES)} can update a parameter, not "
                    f"the {spec.op} of {spec.dtype}"
                )
        return self._linked().register(
            name, specs, state_names=state_names, window_bytes=window_bytes, gpu=gpu, memory=memory
        )

    def all_reduce(self, array: AnyArray, *, op: str = "sum") -> None:
        """Reduces an unregistered array over all workers, in place; every worker calls it with the same arguments.

        Args:
            array: A NumPy, PyTorch or CuPy array, or any other with `__dlpack__` or `__cuda_array_interface__`;
                C-contiguous and writable. One on a GPU is copied to the host and back. Its dtype is in ITEM_BYTES
                (bfloat16 as ml_dtypes.bfloat16) and equal on all workers.
            op: "sum", "mean" or "max".

        Raises:
            ValueError, TypeError, GpuUnavailableError: If the array cannot be taken; says what to pass instead.
        """
        with HostValues(array, "all_reduce", writes=True) as values:
            dtype = reducible(values.dtype, op)
            self._open().all_reduce(values.ctypes.data, values.size, dtype, op)

    def limit_waits(self, timeout_s: float) -> None:
        """Replaces the settings' timeout for all later opening, registering and pulling.

        Raises:
            ValueError: If `timeout_s` is not positive.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} leaves no time to wait; give it more than 0")
        client = self._open()
        if isinstance(client, Client):
            client.timeout_s = timeout_s

    def open_async_reducer(self) -> AsyncReducer:
        """Opens a reducer that takes tensors by name from any thread. Until it closes, nothing else may be reduced.

        Raises:
            ValueError: If the job has only one worker, or goes on without lost ones.
        """
        if self.settings.least_workers:
            raise ValueError(
                "reducing tensors by name needs all workers, but COARSE_MIN_WORKERS lets the job go on without lost "
                "ones; unset it, or train with coarse.torch.DistributedDataParallel"
            )
        return self._linked().open_async_reducer()

    def broadcast(self, array: AnyArray, *, root: int = 0) -> None:
        """Copies worker `root`'s array to all workers, in place; every worker calls it with the same arguments.

        Args:
            array: As for all_reduce(), but of any plain dtype; the same number of bytes on all workers.
            root: The rank whose contents all workers receive.

        Raises:
            ValueError, TypeError, GpuUnavailableError: As for all_reduce(), and if `root` is no rank.
            WorkerLostError: If worker `root` is lost; the array may be partly overwritten.
        """
        if not 0 <= root < self.num_places:
            raise ValueError(f"root={root} is not a rank of {self.num_places} workers")
        present = self.identity.rank == root
        with HostValues(array, "broadcast", reads=present, writes=True) as values:
            self._open().all_reduce(values.ctypes.data, values.nbytes, "uint8", "sum", present=present)

    def barrier(self) -> None:
        """Returns when every worker has called it."""
        self.all_reduce(np.zeros(1, dtype=np.int32))

    def store(self, key: str, array: AnyArray, *more: AnyArray) -> int:
        """Stores an array in the memory devices' parameter storage; returns its version.

        Any worker of this node can load it. Each node has its own storage.

        Args:
            key: Up to 1,000 characters.
            array: As for all_reduce(), but of any plain dtype, not empty; it may be read-only.
            more: Further ones; their bytes follow in the same value.

        Raises:
            OutOfDeviceMemoryError: If the memory device cannot hold it; the previous value stays.
            ValueError, TypeError, GpuUnavailableError: As for all_reduce(), and if the array is empty.
        """
        user = f"stored tensor {key!r}"
        with contextlib.ExitStack() as stack:
            values = [stack.enter_context(HostValues(each, user)) for each in (array, *more)]
            if not all(each.nbytes for each in values):
                raise ValueError(f"{user}: needs a non-empty array")
            return self._open().store(key, *(each.reshape(-1).view(np.uint8).data for each in values))

    def load(self, key: str) -> StoredValue:
        """The newest value that any worker of this node has stored under `key`.

        It never changes, even when a newer value is stored. `np.frombuffer(stored.value, dtype)` makes an array
        from it without a copy.
        """
        return self._open().load(key)

    def snapshot_stored(self) -> StorageSnapshot:
        """Begins a snapshot of all stored values of this node; later store() calls do not change it.

        Raises:
            SnapshotsBusyError: If this worker holds too many snapshots.
        """
        return self._open().snapshot_stored()

    def open_probes(self, largest_bytes: int) -> LinkProbes:
        """Allocates memory for link probes of up to `largest_bytes`; every worker calls it with the same arguments.

        Raises:
            OutOfDeviceMemoryError: If the memory devices have too little memory.
            ValueError: If the job has only one worker, and thus no link.
        """
        client = self._open()
        if isinstance(client, SingleWorkerClient):
            raise ValueError("a session of one worker has no links")
        return client.open_probes(largest_bytes)

    @property
    def emulation(self) -> EmulatedSession | None:
        """The machine whose links this session is paced to, so that its times are *emulated*; None for real links."""
        client = self._open()
        if not isinstance(client, Client) or client.emulation is None:
            return None
        return EmulatedSession(client.emulation, client.ask_home)

    @property
    def routing(self) -> RoutingTable | None:
        """The routes of this worker's shards to memory devices; None in a job of one worker."""
        client = self._open()
        return client.routing if isinstance(client, Client) else None

    def adopt_routing(self, table: RoutingTable) -> None:
        """Routes this worker's shards by `table` from their next push on. Results stay the same.

        Raises:
            ValueError: If the table names a memory device that does not exist, or, with rings over emulated links,
                another one than the worker's own; or if the job has one worker.
        """
        self._linked().adopt_routing(table)

    def check_others(self) -> None:
        """Raises if a worker or memory device is lost, like a wait for a tensor."""
        client = self._open()
        if isinstance(client, Client):
            client.check_others()

    def release_buffers(self) -> None:
        """Frees the memory that all_reduce() and broadcast() keep for their next call; every worker calls it."""
        self._open().release_buffers()

    def close(self, *, is_finished: bool = True) -> None:
        """Leaves the job; memory devices end when the last worker has left. Idempotent.

        Args:
            is_finished: Whether this worker has completed its work. If not, persistent devices wait for the next
                attempt.
        """
        self._close(is_finished=is_finished)

    def _close(self, *, is_finished: bool, leaves_early: bool = False) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        self._notice.close()
        if self._endpoint is not None and os.getpid() == self._pid:
            self._endpoint.close()
        if self._answering is not None:
            self._answering.close()
        client.close(is_finished=is_finished, leaves_early=leaves_early)
        _native.cuda_unmap_unused()
        goes_on = leaves_early or (bool(self.settings.keep_devices) and not is_finished)
        if self._processes is not None and not goes_on and os.getpid() == self._pid:
            self._processes.reap(_DEVICE_EXIT_TIMEOUT_S)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(is_finished=error is None)

    def metrics(self) -> Metrics:
        """The metrics of this node's workers and memory devices (docs/metrics.md); reading takes under a millisecond.

        Raises:
            SessionClosedError: After close().
        """
        return self._open().read_metrics()

    def reporter(self, write: WriteScalar, *, every: int = 100) -> MetricsReporter:
        """Reports metrics(), counters as rates, to a function while the script trains; call its step() once per step.

        Args:
            write: Takes tag, value and step of each scalar: `SummaryWriter.add_scalar` of TensorBoard, or your own.
            every: Steps between two reports.

        Raises:
            ValueError: If `every` is below 1.
        """
        return MetricsReporter(self.metrics, write, every=every)

    @property
    def metrics_writer(self) -> MetricsWriter:
        """Counts events of this worker; counts nothing after close()."""
        return MetricsWriter() if self._client is None else self._client.metrics

    def count_samples(self, number: int) -> None:
        """Adds to coarse_samples_total, from which samples per second follow.

        Args:
            number: Samples that this worker has trained on since the last call, such as the rows of its batch.
        """
        self._open().metrics.add("coarse_samples_total", number)

    def decisions(self) -> list[str]:
        """Decisions about this node's links and algorithm since the start, with their reasons, one line each."""
        chosen = self._client.algorithm_choice if isinstance(self._client, Client) else None
        choices = () if chosen is None else chosen.describe()
        planned = [] if self._planning is None else self._planning.decisions()
        return [*self._decisions, *choices, *planned]

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the workers that contributed to the last step that this worker has pulled as a whole.

        All workers but those that were lost before (docs/guides/elastic.md). After a step, equal on all workers.
        """
        client = self._open()
        return client.members.ranks if isinstance(client, Client) else (self.identity.rank,)

    def on_change(self, callback: Callable[[WorldChange], object]) -> None:
        """Calls back when `members` change: after the same step on all workers, in the training thread.

        A new worker is not called for its own entry: `members` is the world in which it begins.

        Args:
            callback: Is told the ranks before and after, `change.old` and `change.new`.
        """
        client = self._open()
        if isinstance(client, Client):
            client.members.on_change(callback)

    def on_newcomers(self, callback: Callable[[frozenset[int]], object]) -> None:
        """Calls back with the ranks of newcomers, before the forward of their first step, in all other members.

        Before on_change(), and also if a newcomer has the rank of a worker that was lost within the same step.
        """
        client = self._open()
        if isinstance(client, Client):
            client.members.on_newcomers(callback)

    def on_leave(self, callback: Callable[[], object]) -> None:
        """Calls back in leave(), while this worker is still connected."""
        self._on_leave.append(callback)

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker has the place of a lost one, and does not take part in the training yet."""
        client = self._open()
        return isinstance(client, Client) and client.is_newcomer

    @property
    def entering(self) -> frozenset[int]:
        """Ranks of the newcomers that enter together with this one; for on_entry()."""
        return self._linked().entering

    def join_training(self, *, state: Mapping[str, WorkerState] | None = None) -> int:
        """Returns when this worker takes part in the training: at once, unless it has the place of a lost worker.

        Call it when models and optimizers are built, and no later than the first forward, which calls it otherwise.

        Args:
            state: Objects by name whose state a newcomer takes over from a member, before this returns: optimizers
                that run on the workers, schedulers, GradScaler and all else with state_dict() and load_state_dict().
                Every worker passes the same names. coarse.torch.DistributedDataParallel reads and loads them.

        Returns:
            Number of steps that the job has begun before; a step is a forward after an update.

        Raises:
            TypeError: If an object in `state` has no state_dict() or load_state_dict().
            CoarseError: If the job ends before, or this worker has not built what the others have.
        """
        client = self._open()
        if state is not None:
            self.worker_state = checked(state)
        if not isinstance(client, Client):
            return 0
        client.join_training()
        return client.num_begun_steps

    def begin_step(self) -> frozenset[int]:
        """Begins a step, in which newcomers may take part; every worker calls it at the same point of its program.

        coarse.torch.DistributedDataParallel calls it. Without COARSE_ON_LOSS=replace no newcomers come.

        Returns:
            Ranks of the workers that take part from this step on, in places of lost ones.

        Raises:
            SystemExit: If this worker is asked to leave; it has left then.
        """
        if self.is_asked_to_leave:
            self.leave()
            raise SystemExit(0)
        client = self._open()
        return client.begin_step() if isinstance(client, Client) else frozenset()

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether SIGTERM has asked this worker to leave at the end of its step; the others go on without it.

        Never True where the job does not go on without lost workers (COARSE_MIN_WORKERS) or too few would be left:
        SIGTERM then ends the process at once, as does a second one.
        """
        return self._notice.has_come

    def leave(self) -> None:
        """Leaves a job in which the others go on. Call it between two steps, and end the process then. Idempotent.

        What this worker has pushed counts as a whole. Its place is vacant, and its departure is no failure.

        Raises:
            ValueError: If the job does not go on without lost workers.
        """
        if not isinstance(self._client, Client):
            return self.close()
        if not self.settings.least_workers:
            raise ValueError(
                f"worker {self.identity.rank} cannot leave early: the others need it. Set COARSE_MIN_WORKERS, and "
                "they go on without it; or give every worker the same number of steps, and call close()"
            )
        for callback in self._on_leave:
            callback()
        steps = self._client.num_steps
        note = {"left": self.identity.rank, "step": steps, "is_asked": self.is_asked_to_leave}
        tell_launcher(notes_pipe(), note)
        logger.info("[w%d] leaves at step %d", self.identity.rank, steps)
        self._close(is_finished=False, leaves_early=True)

    def _heed_notices(self) -> None:
        """From now on, SIGTERM asks this worker to leave, if the others can go on without it."""
        if self.settings.least_workers:
            self._notice.open()

    @property
    def _may_leave(self) -> bool:
        client = self._client
        return isinstance(client, Client) and len(client.members.ranks) > self.settings.least_workers

    def on_entry(self, callback: Callable[[], object]) -> None:
        """Calls back when this newcomer takes part in the training, before its first step."""
        self._linked().on_entry(callback)

    @property
    def node_workers(self) -> tuple[int, ...]:
        """The ranks of this node's workers, indexed by the client number that profiles and partition tables use."""
        return (self.identity.rank,) if self._node is None else self._node.ranks

    @property
    def num_places(self) -> int:
        """Workers that the job has at most: as many as have started, unless COARSE_MAX_WORKERS lets others join."""
        return 1 if self._node is None else sum(map(len, self._node.nodes.ranks))

    @property
    def most_workers_of_a_node(self) -> int:
        """The largest number of workers on any node of the job."""
        return 1 if self._node is None else max(map(len, self._node.nodes.ranks))

    @property
    def partition_table(self) -> PartitionTable | None:
        """The clients that each memory device of this node serves; None in a job of one worker."""
        return None if self._node is None else self._node.table

    @property
    def device_pids(self) -> tuple[int, ...]:
        """Process ids of the memory devices that this worker started; empty on other workers."""
        return () if self._processes is None else self._processes.pids

    def _serve_metrics(self) -> None:
        """Serves the metrics of a job without memory devices, if the settings say so."""
        if self.settings.metrics_port:
            from coarse.metrics.endpoint import try_endpoint  # slow to import

            address, port = self.settings.metrics_address, self.settings.metrics_port
            self._endpoint = try_endpoint(self._open().read_metrics, address, port, f"w{self.identity.rank}")

    @property
    def _processes(self) -> DeviceProcesses | None:
        return None if self._node is None else self._node.processes

    def _plan_links(self, client: Client, node: NodeDevices, found: FoundProfile) -> None:
        """Plans routes and shard sizes from the profile that was found, or measures one now."""
        profile, note = found.profile, found.note
        if found.is_to_be_measured:
            profile, note = self._measure_links(note)
        emulated = self.emulation
        measured = profile
        if profile is None and self.settings.profile != OFF:
            profile, note = _seed(node.table, node.local_devices, note)
        self._profile = profile
        plan = plan_links(
            profile,
            note,
            local_devices=node.local_devices,
            settings=self.settings,
            links=None if emulated is None else emulated.links,
        )
        client.adopt_plan(plan.tables[node.ranks.index(self.identity.rank)], plan.shard_bytes)
        # Dual synchronisation also considers sync cores, which firmware data does not describe.
        self._planning = StepPlanning(self, client.table, profile=measured, plan=plan)
        algorithm = describe_algorithm(self.settings, node.table, num_nodes=node.nodes.num_nodes)
        compression = describe_compression(self.settings, num_nodes=node.nodes.num_nodes)
        choices = (each for each in (algorithm, compression) if each)
        self._decisions = (*plan.decisions, *choices, *self._planning.check())
        if self.identity.rank == node.ranks[0]:
            for decision in self._decisions:
                logger.info("[w%d] %s", self.identity.rank, decision)

    def _invite_newcomers(self, client: Client, node: NodeDevices) -> None:
        """Opens the boundary of steps, at which newcomers come, and tells the launcher how they find the session."""
        next_group = client.next_group
        client.open_boundary()
        self.invitation = Invitation.of_session(node, shard_bytes=client.shard_bytes, next_group=next_group)
        if self.identity.rank == 0:
            tell_launcher(notes_pipe(), {"invitation": self.invitation.to_fields()})

    def _tell_decisions(self, job: str) -> None:
        """Tells `coarse run` in three lines what this session has decided, on the first worker of the job."""
        if self.identity.rank or self._node is None:
            return
        table = self._node.table
        size = f"{self.identity.world_size} workers on {self._node.nodes.num_nodes} node(s)"
        memories = ", ".join(f"md{device} in {memory}" for device, memory in enumerate(table.memories))
        links, *_ = self._decisions
        told = ("algorithm:", "compression between nodes:", "shards ")
        decided = [each for each in self._decisions if each.startswith(told)]
        lines = [
            f"job {job_id(job)}: {size}, {memories}",
            links,
            "; ".join(reversed(decided)),
        ]
        tell_launcher(notes_pipe(), {"decisions": lines})

    def _describe_plan(self) -> Report:
        """What this session has decided, for the dashboard; called in the responder's thread."""
        table = self.partition_table
        return {
            "decisions": self.decisions(),
            "machine": self.settings.machine,
            "memories": [] if table is None else list(table.memories),
            "nodes": [] if self._node is None else list(map(list, self._node.nodes.ranks)),
            "links": [] if self._profile is None else self._link_limits(self._profile),
        }

    def _link_limits(self, profile: Profile) -> list[Report]:
        """What the links of this node's workers carry at most, by the profile of the session's start."""
        from coarse.profiler.profile import PUSH

        dilation = self.settings.time_dilation if self.settings.machine else 1.0
        curves = {
            (path.source, path.target): curve for path, curve in profile.curves.items() if path.kind == PUSH
        }
        return [
            {
                "worker": self.node_workers[client],
                "device": device,
                "bytes_per_s": curve.peak_gbytes_per_s * 1e9 / dilation,
                "kind": profile.kind,
            }
            for (client, device), curve in curves.items()
        ]

    def _measure_links(self, note: str) -> tuple[Profile, str]:
        """Measures the links together with all workers; the node's first worker saves the result."""
        from coarse.profiler.profile import cache_path
        from coarse.tuning.measure import measure_profile

        profile = measure_profile(self)
        path = cache_path(profile.key)
        if self.identity.rank == self.node_workers[0]:
            try:
                profile.save(path)
            except OSError as error:
                logger.warning("the profile cannot be saved to %s: %s", path, error.strerror)
        return profile, f"{profile.kind} now ({note})"

    def _linked(self) -> Client:
        client = self._open()
        if not isinstance(client, Client):
            raise ValueError("a job of one worker has no memory devices, and no links to them")
        return client

    def _open(self) -> Client | SingleWorkerClient:
        if self._client is None:
            raise SessionClosedError(f"worker {self.identity.rank}: the session is closed")
        return self._client


def _record_timeline(settings: Settings, identity: WorkerIdentity, attempt: Attempt, *, node: int) -> None:
    process = Process(
        role=WORKER,
        number=identity.rank,
        node=node,
        attempt=attempt.number,
        num_clients=identity.local_world_size,
    )
    recorder.start(settings.timeline, process, num_events=settings.timeline_events)


def _seed(table: PartitionTable, local_devices: Sequence[int], note: str) -> tuple[Profile | None, str]:
    """A profile from the firmware's memory data, used until one is measured; None if that data is insufficient."""
    if any(device.memory.kind != "numa" for device in table.devices):
        return None, note
    from coarse.machine.firmware_links import firmware_links
    from coarse.machine.host import read_numa_nodes
    from coarse.profiler.linked import profile_from_links

    links = firmware_links(table, read_numa_nodes())
    if links is None:
        return None, note
    return profile_from_links(links, local_devices), f"simulated from the firmware's figures (HMAT); {note}"


def _come_together(joining: Joining) -> tuple[Client, NodeDevices, FoundProfile]:
    with joining.watch.telling():
        node = provide_devices(joining)
    try:
        with (
            joining.watch.telling()
        ):  # the reason, before the others notice that their memory devices are gone
            found = agree_on_profile(joining, node)
            client = connect(joining, node)
    except BaseException:
        if node.processes is not None:
            node.processes.kill()
        raise
    if node.processes is not None and joining.keeping is None and not joining.settings.replaces_workers:
        node.processes.hide()
    return client, node, found

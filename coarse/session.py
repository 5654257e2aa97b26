"""A session connects the workers and memory devices of one job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType

import numpy as np

from coarse.arrays import AnyArray, HostValues
from coarse.client.async_reducer import AsyncReducer
from coarse.client.link_probes import LinkProbes
from coarse.client.membership.members import WorldChange
from coarse.client.memory.parameter_storage import StorageSnapshot
from coarse.client.memory.stored_value import StoredValue
from coarse.client.tensor_group import TensorGroup
from coarse.emulation.emulated_session import EmulatedSession
from coarse.env import Attempt, WorkerIdentity
from coarse.machine.partition_table import PartitionTable
from coarse.metrics.reporter import MetricsReporter, WriteScalar
from coarse.metrics.values import Metrics
from coarse.metrics.writer import MetricsWriter
from coarse.profiler.routing import RoutingTable
from coarse.schema import TensorSpec
from coarse.session_parts.checks import cannot_update_by, check_specs, check_updatable, reducible
from coarse.session_parts.membership import Membership
from coarse.session_parts.plan import SessionPlan
from coarse.session_parts.session_client import AnyTensorGroup, SessionClient
from coarse.session_parts.start import Started, starting
from coarse.settings import Settings
from coarse.startup.newcomer import Invitation
from coarse.store import Store
from coarse.wire.registration import EAGER, WorkerMemory
from coarse.worker_state import WorkerState

__all__ = ["AnyTensorGroup", "Session", "WorldChange"]

_DEVICE_EXIT_TIMEOUT_S = 0.5


class Session:
    """One worker's membership in a job.

    Session.join() creates it. It lives until close() or the end of a `with` block. Use it from one thread at a time;
    several sessions can live in one process.
    """

    def __init__(self, started: Started) -> None:
        start, client = started.start, started.client
        self.identity = start.identity
        self.settings = start.settings
        self.failpoints = started.failpoints()
        self._services = start.services
        self._services.close_with(self)
        self._client = SessionClient(self.identity.rank, client)
        self._node = started.node
        self._membership = Membership(
            self.identity.rank, self.settings.least_workers, self._client, self.node_workers
        )
        self._plan = SessionPlan(self.settings, self._client, self._node)
        self._pid = os.getpid()
        self.invitation: Invitation | None = None
        """How a new worker enters this session in the place of a lost one; None if it takes none."""
        client.metrics.set("coarse_world_size", self.identity.world_size)
        client.metrics.set("coarse_restarts", start.attempt.number)

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
        with starting(identity, settings, attempt) as start:
            if identity.world_size == 1:
                return cls(start.alone())
            with start.together(store, name) as together:
                session = cls(together.started)
                try:
                    with together.watch.telling():
                        session._plan.make(session, together.node, together.found)
                        session.invitation = together.invite_newcomers()
                except BaseException:
                    session.close()
                    raise
            session._services.follow(together.client, session._plan.describe)
            if identity.rank == 0:
                session._plan.announce(start.attempt.job)
            session._membership.heed_notices()
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
            invitation: The one that the session's first worker has given to its launcher.
            settings, attempt: As for join().

        Raises:
            RendezvousError: If the place does not become vacant.
            MemoryDeviceLostError, WorkerLostError: If the job has ended.
        """
        with starting(identity, settings, attempt) as start:
            started = start.enter(invitation)
            session = cls(started)
            session.invitation = invitation
            session._membership.heed_notices_from_entry()
            session._services.follow(session._client.linked(), session._plan.describe)
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
        client = self._client.of_several()
        if client is None:
            return self._client.any().register(name, specs)
        is_open = self._plan.may_reduce_on_host
        group = client.register(
            name,
            specs,
            are_gradients=are_gradients,
            is_open=is_open,
            on_host=on_host,
            gpu=gpu,
            memory=memory,
        )
        if not on_host:
            self._plan.watch(self, group, gpu)
        return group

    def register_trial(self, name: str, specs: Sequence[TensorSpec], gpu: str) -> TensorGroup:
        """Like register(), but planning ignores the steps of these tensors."""
        return self._client.linked().register(name, specs, gpu=gpu)

    def cannot_move_slots(self, group: TensorGroup) -> str:
        """Client.cannot_move_slots()."""
        return self._client.linked().cannot_move_slots(group)

    def move_slots(self, group: TensorGroup, gpu: str) -> bool:
        """Client.move_slots()."""
        return self._client.linked().move_slots(group, gpu)

    def cannot_update(self, gpu: str = "") -> str:
        """Why the memory devices of this session cannot run an optimizer; "" if they can.

        Args:
            gpu: GPU of the parameters, as for Client.register().
        """
        client = self._client.of_several()
        if client is None:
            return "a job of one worker has no memory devices"
        return cannot_update_by(self.settings) or client.cannot_share_parameters(gpu)

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
        check_updatable(specs)
        return self._client.linked().register(
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
            self._client.any().all_reduce(values.ctypes.data, values.size, dtype, op)

    def limit_waits(self, timeout_s: float) -> None:
        """Replaces the settings' timeout for all later opening, registering and pulling.

        Raises:
            ValueError: If `timeout_s` is not positive.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} leaves no time to wait; give it more than 0")
        client = self._client.of_several()
        if client is not None:
            client.timeout_s = timeout_s

    def open_async_reducer(self) -> AsyncReducer:
        """Opens a reducer that takes tensors by name from any thread. Until it closes, nothing else may be reduced.

        Raises:
            ValueError: If the job has only one worker, takes new ones, or goes on without lost ones on several nodes.
        """
        if self.settings.replaces_workers:
            raise ValueError(
                "COARSE_ON_LOSS=replace, COARSE_MAX_WORKERS: new workers cannot join a job that reduces tensors by "
                "name. Set COARSE_ON_LOSS=continue and no COARSE_MAX_WORKERS, or train with "
                "coarse.torch.DistributedDataParallel"
            )
        client = self._client.linked()
        if self.settings.least_workers and client.has_other_nodes:
            raise ValueError(
                "COARSE_MIN_WORKERS: reducing tensors by name goes on without lost workers only within one node, but "
                "this job has several. Unset it, or train with coarse.torch.DistributedDataParallel"
            )
        return client.open_async_reducer()

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
            self._client.any().all_reduce(values.ctypes.data, values.nbytes, "uint8", "sum", present=present)

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
            return self._client.any().store(key, *(each.reshape(-1).view(np.uint8).data for each in values))

    def load(self, key: str) -> StoredValue:
        """The newest value that any worker of this node has stored under `key`.

        It never changes, even when a newer value is stored. `np.frombuffer(stored.value, dtype)` makes an array
        from it without a copy.
        """
        return self._client.any().load(key)

    def snapshot_stored(self) -> StorageSnapshot:
        """Begins a snapshot of all stored values of this node; later store() calls do not change it.

        Raises:
            SnapshotsBusyError: If this worker holds too many snapshots.
        """
        return self._client.any().snapshot_stored()

    def open_probes(self, largest_bytes: int) -> LinkProbes:
        """Allocates memory for link probes of up to `largest_bytes`; every worker calls it with the same arguments.

        Raises:
            OutOfDeviceMemoryError: If the memory devices have too little memory.
            ValueError: If the job has only one worker, and thus no link.
        """
        client = self._client.of_several()
        if client is None:
            raise ValueError("a session of one worker has no links")
        return client.open_probes(largest_bytes)

    @property
    def emulation(self) -> EmulatedSession | None:
        """The machine whose links this session is paced to, so that its times are *emulated*; None for real links."""
        client = self._client.of_several()
        if client is None or client.emulation is None:
            return None
        return EmulatedSession(client.emulation, client.ask_home)

    @property
    def routing(self) -> RoutingTable | None:
        """The routes of this worker's shards to memory devices; None in a job of one worker."""
        client = self._client.of_several()
        return None if client is None else client.routing

    def adopt_routing(self, table: RoutingTable) -> None:
        """Routes this worker's shards by `table` from their next push on. Results stay the same.

        Raises:
            ValueError: If the table names a memory device that does not exist, or, with rings over emulated links,
                another one than the worker's own; or if the job has one worker.
        """
        self._client.linked().adopt_routing(table)

    def check_others(self) -> None:
        """Raises if a worker or memory device is lost, like a wait for a tensor."""
        client = self._client.of_several()
        if client is not None:
            client.check_others()

    def release_buffers(self) -> None:
        """Frees the memory that all_reduce() and broadcast() keep for their next call; every worker calls it."""
        self._client.any().release_buffers()

    def close(self, *, is_finished: bool = True) -> None:
        """Leaves the job; memory devices end when the last worker has left. Idempotent.

        Args:
            is_finished: Whether this worker has completed its work. If not, persistent devices wait for the next
                attempt.
        """
        self._close(is_finished=is_finished)

    def _close(self, *, is_finished: bool, leaves_early: bool = False) -> None:
        if self._client.is_closed:
            return
        self._membership.close()
        self._services.close()
        self._client.close(is_finished=is_finished, leaves_early=leaves_early)
        goes_on = leaves_early or (bool(self.settings.keep_devices) and not is_finished)
        processes = None if self._node is None else self._node.processes
        if processes is not None and not goes_on and os.getpid() == self._pid:
            processes.reap(_DEVICE_EXIT_TIMEOUT_S)

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
        return self._client.any().read_metrics()

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
        return self._client.metrics

    def count_samples(self, number: int) -> None:
        """Adds to coarse_samples_total, from which samples per second follow.

        Args:
            number: Samples that this worker has trained on since the last call, such as the rows of its batch.
        """
        self._client.any().metrics.add("coarse_samples_total", number)

    def decisions(self) -> list[str]:
        """Decisions about this node's links and algorithm since the start, with their reasons, one line each."""
        return self._plan.decisions()

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the workers that contributed to the last step that this worker has pulled as a whole.

        All workers but those that were lost before (docs/guides/elastic.md). After a step, equal on all workers.
        """
        return self._membership.ranks

    def remove_members(self, lost: Collection[int]) -> None:
        """Notes that workers are lost, which a reduction by name has shown; every worker calls it after the same one.

        Results of groups that are pulled as a whole show it by themselves.
        """
        self._membership.remove(lost)

    def on_change(self, callback: Callable[[WorldChange], object]) -> None:
        """Calls back when `members` change: after the same step on all workers, in the training thread.

        A new worker is not called for its own entry: `members` is the world in which it begins.

        Args:
            callback: Is told the ranks before and after, `change.old` and `change.new`.
        """
        self._membership.on_change(callback)

    def on_newcomers(self, callback: Callable[[frozenset[int]], object]) -> None:
        """Calls back with the ranks of newcomers, before the forward of their first step, in all other members.

        Before on_change(), and also if a newcomer has the rank of a worker that was lost within the same step.
        """
        self._membership.on_newcomers(callback)

    def on_leave(self, callback: Callable[[], object]) -> None:
        """Calls back in leave(), while this worker is still connected."""
        self._membership.on_leave(callback)

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker has the place of a lost one, and does not take part in the training yet."""
        return self._membership.is_newcomer

    @property
    def entering(self) -> frozenset[int]:
        """Ranks of the newcomers that enter together with this one; for on_entry()."""
        return self._client.linked().entering

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
            CoarseError: If the job ends first, or this worker has not built the same models and optimizers.
        """
        return self._membership.join_training(state)

    @property
    def worker_state(self) -> Mapping[str, WorkerState]:
        """The `state` of join_training()."""
        return self._membership.worker_state

    def begin_step(self) -> frozenset[int]:
        """Begins a step, in which newcomers may take part; every worker calls it at the same point of its program.

        coarse.torch.DistributedDataParallel calls it. Without COARSE_ON_LOSS=replace no newcomers come.

        Returns:
            Ranks of the workers that take part from this step on, in places of lost ones.

        Raises:
            SystemExit: If this worker is asked to leave; it has left then.
        """
        if self._membership.notice.has_come:
            self.leave()
            raise SystemExit(0)
        client = self._client.of_several()
        return frozenset() if client is None else client.begin_step()

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether SIGTERM has asked this worker to leave at the end of its step; the others go on without it.

        Never True where the job does not go on without lost workers (COARSE_MIN_WORKERS) or too few would be left:
        SIGTERM then ends the process at once, as does a second one.
        """
        return self._membership.notice.has_come

    def leave(self) -> None:
        """Leaves a job in which the others go on. Call it between two steps, and end the process then. Idempotent.

        What this worker has pushed counts as a whole. Its place is vacant, and its departure is no failure.

        Raises:
            ValueError: If the job does not go on without lost workers.
        """
        if self._membership.announce_departure():
            self._close(is_finished=False, leaves_early=True)
        else:
            self.close()

    def on_entry(self, callback: Callable[[], object]) -> None:
        """Calls back when this newcomer takes part in the training, before its first step."""
        self._client.linked().on_entry(callback)

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
        processes = None if self._node is None else self._node.processes
        return () if processes is None else processes.pids

"""Tensors that are registered with the memory devices, as a worker pushes and pulls them."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from coarse.client.direct_allreduce import HostDirectAllReduce, NodeBarrier
from coarse.client.gpu.gpu_transfers import NOTHING, GpuTensor, GpuTransfers
from coarse.client.gpu.nccl_direct_allreduce import NcclDirectAllReduce
from coarse.client.interfaces import HomeDevice, Waiter
from coarse.client.memory.optimizer_memory import OptimizerMemory
from coarse.client.memory.reservations import Reservations
from coarse.client.memory.row_memory import RowMemory
from coarse.client.memory.slot_opener import DistantSlots
from coarse.client.memory.snapshots import PoolStatistics, Snapshot
from coarse.client.memory.tensor_bytes import GpuBytes, TensorBytes, gpu_context
from coarse.errors import ProtocolError, SessionClosedError, SnapshotsBusyError
from coarse.kernels import _native
from coarse.machine.emulation import Emulation
from coarse.profiler.routing import RoutingTable
from coarse.schema import ITEM_BYTES
from coarse.wire.failure_messages import overwritten_counter
from coarse.wire.messages import Message
from coarse.wire.registration import PARAMETERS, SLOTS, STATES, GroupSchema, RecoveredUpdates, WorkerPlaces

if TYPE_CHECKING:
    from coarse.client.memory.private_writes import PrivateWrites

_OWN_PATH_FLAGS = {
    "ring": _native.OWN_PATH,
    "all-gather": _native.OWN_PATH | _native.ALL_GATHER,
    "all-to-all": _native.OWN_PATH | _native.ALL_TO_ALL,
}


class UpdateKind(enum.IntEnum):
    """What a push does to the parameter of a tensor."""

    NONE = 0
    """Nothing: the slots of all workers become the result."""
    UPDATE = _native.UPDATE
    """The result updates it; slots stay as they are."""
    UPDATE_BY_MEAN = _native.UPDATE | _native.REDUCED
    """The slots, which hold the same on every worker, update it."""
    MEASURE = _native.MEASURE
    """Nothing, as NONE, but the result is measured: measures(). Of a group with an optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMeasure:
    """What the memory devices saw of the mean of one tensor while they reduced it.

    Args:
        sum_of_squares: Of its elements, in float64; 0 where nobody contributed.
        first_nonfinite: What brought NaN or Inf into it: the rank of the first worker with some in its contribution;
            EVERYBODY if finite contributions overflowed in the mean, or if nobody knows, as with several nodes;
            None if it is finite.
    """

    sum_of_squares: float
    first_nonfinite: int | None


EVERYBODY: int = _native.EVERYBODY
"""Stands for a worker in GradientMeasure."""


class GroupClient(Waiter, HomeDevice, Protocol):
    """A client as its tensor groups use it."""

    @property
    def number(self) -> int:
        """Of this worker among those of its node."""

    @property
    def names(self) -> Sequence[str]:
        """The workers of this node in words, by client number."""

    @property
    def warn_after_s(self) -> float:
        """How long a wait may take before it is logged; 0 for ever."""

    @property
    def routing(self) -> RoutingTable:
        """Which memory device takes which shard."""

    @property
    def emulation(self) -> Emulation | None:
        """The links that are emulated; None for those that are there."""

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended."""

    @property
    def has_other_nodes(self) -> bool:
        """Whether some workers of the session are on other nodes."""

    def describe_device(self, device: int) -> str:
        """A memory device of this node, in words."""

    def describe_progress(self) -> str:
        """What the other nodes are doing, in words."""

    def tell_devices(self, message: Message) -> None:
        """Sends a message to all memory devices."""

    def open_node_barrier(self, name: str, most_numbers: int) -> NodeBarrier:
        """Makes a place where the workers of the node meet."""

    def release(self, group: int) -> None:
        """Gives a tensor group up."""


class TensorGroup:
    """Tensors that were registered together: a slot of device memory for each, which only this worker writes.

    A tensor is pushed, and pulled before it is pushed again; in between its slot belongs to the memory devices.
    Thread safety: one caller at a time, whichever thread it is.
    """

    def __init__(
        self,
        client: GroupClient,
        native: _native.Client,
        group: int,
        schema: GroupSchema,
        tensor_offsets: Sequence[int],
        slots: TensorBytes,
        kept: OptimizerMemory | None = None,
        recovered: RecoveredUpdates | None = None,
        rows: RowMemory | None = None,
        distant: DistantSlots | None = None,
        places: WorkerPlaces | None = None,
        reservations: Reservations | None = None,
    ) -> None:
        self.id = group
        self.name = schema.name
        self.specs = schema.specs
        self.recovered = recovered
        """What parameters and states hold that were kept since the last attempt; None if they are new."""
        self._client = client
        self._native = native
        self._schema = schema
        self._own_shards: dict[int, int] = {}  # the tensor of each
        self._own_path: HostDirectAllReduce | None = None
        self._meeting: NodeBarrier | None = None
        self._pulls_singly = False
        self._on_push: Callable[[Sequence[int]], None] | None = None
        self._on_step: Callable[[Sequence[int]], None] | None = None
        self.gpu: GpuTransfers | None = None
        """Of tensors in the memory of a GPU, once open_gpu_transfers() was called."""
        self.nccl = NcclDirectAllReduce(self, native)
        """By which workers with tensors on GPUs may reduce some of them themselves."""
        self._offsets = tensor_offsets
        self._slots: TensorBytes | None = slots
        self._kept = kept
        self._own_parameters: PrivateWrites | None = None
        self._rows = rows
        self._distant = distant  # slots on another GPU
        self._reservations = reservations
        self.places = places or WorkerPlaces()
        """How many workers of the node have these tensors on GPUs, and had claimed NCCL for another group then."""

    @property
    def rank(self) -> int:
        """Of this worker."""
        return self._client.rank

    @property
    def is_routed_by_itself(self) -> bool:
        """Whether slots lie where it has routes to, whatever the session's are."""
        return bool(self._schema.routes)

    @property
    def routing(self) -> RoutingTable:
        """Which memory device takes which of this worker's shards."""
        return self._schema.routes[self._client.number] if self._schema.routes else self._client.routing

    @property
    def is_on_gpu(self) -> bool:
        """Whether this worker sees its slots on a GPU: buffer() gives GpuBytes, and push() copies nothing."""
        return isinstance(self._slots, GpuBytes) and self._distant is None

    @property
    def address_on_gpu(self) -> int:
        """Where this worker's GPU reaches its slots; 0 if it has none, or does not reach them."""
        if self._distant is not None:
            return self._distant.memory.address if self._distant.is_reached else 0
        return self._slots.address if isinstance(self._slots, GpuBytes) else 0

    @property
    def rows(self) -> RowMemory:
        """This worker's rows of the group's tables, and their means.

        Raises:
            ValueError: If it has no tables.
        """
        if self._slots is None:
            raise self._closed_error()
        if self._rows is None:
            raise ValueError(f"{self.name} has no tables")
        return self._rows

    def buffer(self, index: int) -> TensorBytes:
        """The writable bytes of a tensor's slot; its memory stays valid as long as anything refers to it.

        Raises:
            ValueError: For a table, which has none.
        """
        if self._slots is None:
            raise self._closed_error()
        if self.specs[index].row_elements:
            raise ValueError(
                f"{self.specs[index].name!r} of {self.name} is a table: what is pushed are its rows"
            )
        start = self._offsets[index]
        return self._slots[start : start + self.specs[index].nbytes]

    def reserve_slots(self) -> None:
        """Takes the memory of this worker's slots, where registration left it to the workers. Later calls do nothing.

        To be called before the first push.

        Raises:
            OutOfDeviceMemoryError: If it is not to be had.
        """
        if self._reservations is not None:
            self._reservations.reserve(SLOTS)

    def reserve_parameter(self, index: int) -> None:
        """The same of a parameter, before any worker writes it. Of a group with an optimizer."""
        if self._reservations is not None:
            begin = self._memory_kept().parameter_offset(index)
            self._reservations.reserve_part(PARAMETERS, begin, begin + self.specs[index].nbytes)

    def reserve_states(self) -> None:
        """The same of all states, before the first update."""
        if self._reservations is not None:
            self._reservations.reserve(STATES)

    def parameter(self, index: int) -> TensorBytes:
        """The writable bytes of a parameter, which all workers of the node share. Of a group with an optimizer.

        Memory devices write to it between this worker's push with UPDATE or UPDATE_BY_MEAN and its pull, never else.
        """
        return self._memory_kept().parameter(index, self.specs[index].nbytes)

    def map_own_parameters(self) -> str:
        """Why this worker cannot see parameters apart from others; "" if it can, for open_own_parameters()."""
        return self._memory_kept().map_own_parameters()

    def open_own_parameters(self, *, publishes: bool) -> PrivateWrites:
        """This worker's own view of the parameters. Collective; every worker's map_own_parameters() has returned "".

        Args:
            publishes: As of PrivateWrites.
        """
        lengths = [spec.nbytes for spec in self.specs]
        meeting = self._client.open_node_barrier(f"what is written to {self.name}", 2)
        self._own_parameters = self._memory_kept().open_own_parameters(lengths, meeting, publishes=publishes)
        return self._own_parameters

    @property
    def spans_nodes(self) -> bool:
        """Whether some of the workers are on other nodes."""
        return self._client.has_other_nodes

    @property
    def are_parameters_elsewhere(self) -> bool:
        """Whether parameters lie where this worker's model does not: on the host, or on another GPU."""
        return self._memory_kept().are_parameters_elsewhere

    def updated_parameter(self, index: int) -> int:
        """Where a GPU copies a parameter from that lies elsewhere, for GpuTensor; 0 if it cannot."""
        return self._memory_kept().result(index)

    def slot(self, index: int) -> tuple[int, int]:
        """The first byte of a tensor's slot, counted from this worker's first, and the first one behind it."""
        return self._offsets[index], self._offsets[index] + self.specs[index].slot_bytes

    def is_late(self, index: int) -> bool:
        """Whether a tensor was pushed, its result has not been pulled, and is not there yet."""
        return self._native.is_late(self.id, index)

    def state(self, index: int, number: int) -> TensorBytes:
        """The writable bytes of a parameter's `number`-th state, float32; as parameter(). Mapped only while in use.

        Behind the states of a 16-bit parameter come its master weights, the value that an update starts from
        wherever the parameter is its rounding.
        """
        length = self.specs[index].num_elements * ITEM_BYTES["float32"]
        return self._memory_kept().kept_array(index, number)[:length]

    def settings(self) -> memoryview[Any]:
        """This worker's optimizer settings, a SETTINGS_DTYPE of coarse.client.update_settings for each tensor.

        Of a group with an optimizer. To be written before an update is pushed, and left alone until it is pulled.
        """
        return self._memory_kept().settings

    def snapshot(self) -> Snapshot:
        """Begins a snapshot of parameters and states: one addition to a counter. Of a group with an optimizer.

        Any worker may, on its own, between a pull and its next push: then no update is under way.

        Raises:
            SnapshotsBusyError: If as many as there can be are held.
            ProtocolError: If a worker has overwritten the counter by which snapshots begin.
        """
        trigger = self._memory_kept().snapshots
        number = trigger.begin()
        if number == 0 and (said := trigger.impossible()):
            raise ProtocolError(overwritten_counter(self.name, said, self._client.ranks))
        if number == 0:
            raise SnapshotsBusyError(
                f"{self.name}: {_native.MOST_SNAPSHOTS} snapshots are held already; release one of them first"
            )
        return Snapshot(self._client, self.id, number)

    def warm_snapshots(self) -> None:
        """Lets the memory devices allocate a whole snapshot ahead; returns at once. For a group with an optimizer."""
        self._memory_kept()
        self._client.tell_devices({"type": "warm_snapshots", "group": self.id})

    def keep_snapshots(self) -> None:
        """To be called before a worker itself writes to parameters or states: copies what snapshots refer to."""
        self._memory_kept()
        message = {"type": "keep_snapshots", "group": self.id}
        self._client.ask_home(message, "snapshots_kept", f"snapshots of {self.name}")

    def snapshot_statistics(self) -> PoolStatistics:
        """What the old versions take, and have cost, to which snapshots refer. Of a group with an optimizer."""
        self._memory_kept()
        message = {"type": "snapshot_statistics", "group": self.id}
        reply = self._client.ask_home(message, "snapshot_statistics", f"snapshots of {self.name}")
        return PoolStatistics(**{field.name: reply.message[field.name] for field in fields(PoolStatistics)})

    def push(
        self,
        index: int,
        *,
        present: bool = True,
        joined: bool = False,
        source: int = 0,
        update: UpdateKind = UpdateKind.NONE,
    ) -> None:
        """Contributes a tensor to the next synchronisation.

        Args:
            index: Position in `specs`.
            present: False contributes nothing, as if it were zeros.
            joined: True contributes nothing and does not count in a mean: this worker has run out of inputs.
            source: Address of the tensor's bytes to copy to the slot first; 0 if they are there already.
            update: What becomes of the parameter, by the settings(); the same on every worker.
        """
        if self._slots is None:
            raise self._closed_error()
        if self._on_push is not None:
            self._on_push((index,))
        flags = (
            (_native.PRESENT if present and not joined else 0) | (_native.JOINED if joined else 0) | update
        )
        status = self._native.push(self.id, index, flags, source)
        if status != _native.WaitStatus.DONE:
            self._client.check(status, lambda: f"a place in the queue for {self.specs[index].name!r}")

    def open_gpu_transfers(self, context: _native.CudaContext, *, timeout_s: float = 0.0) -> GpuTransfers:
        """From now on tensors are in the memory of a GPU, and what this returns takes the place of push().

        Slots and parameters in the host's memory are pinned. Where is_on_gpu, the stream that computes writes to the
        slots and reads them. To slots on another GPU this one copies, and buffer() must not be used any more.

        Args:
            context: Of the GPU.
            timeout_s: How long results may take; 0 for as long as any wait of the session.

        Raises:
            CudaError: If memory cannot be pinned, or streams of the GPU cannot wait for the host's memory.
        """
        self.check_open()
        slots, distant = NOTHING, self._distant
        if distant is not None:
            slots = distant.memory.address, distant.memory.num_bytes, gpu_context(distant.gpu)
        elif isinstance(self._slots, memoryview):
            slots = ctypes.addressof(ctypes.c_char.from_buffer(self._slots)), self._slots.nbytes, None
        results = NOTHING if self._kept is None else self._kept.results()
        timeout_s = timeout_s or self._client.timeout_s
        self.gpu = GpuTransfers(self, self._native, context, slots, results, timeout_s)
        if distant is not None:
            self._native.give_up_view(self.id)
            # Pinning has taken all pages of the view, which nobody needs any more.
            self._slots = GpuBytes(distant.memory, 0, distant.memory.num_bytes)
        return self.gpu

    def flush(self) -> None:
        """Wakes memory devices for pushes that were held back to spare wake-ups; pulling does it too."""
        self._native.flush()

    def pull(self, index: int, *, destination: int = 0) -> int:
        """Waits for the result of a pushed tensor.

        Args:
            index: Position in `specs`.
            destination: Address to copy the result to; 0 leaves it in the slot alone.

        Returns:
            How many workers contributed; 0 means that the slot was left as it was.
        """
        if self._slots is None:
            raise self._closed_error()
        if self._own_path is not None and index in self._own_shards.values():
            raise ValueError(
                f"{self.name}: the workers reduce {self.specs[index].name!r} themselves, which ends with pull_all(); "
                "set COARSE_DUAL_SYNC=off to pull tensors one by one"
            )
        self._pulls_singly = True
        status = self._native.pull(self.id, index, destination, self._client.timeout_s)
        if status != _native.WaitStatus.DONE:
            self._client.check(status, lambda: self._describe_wait(index))
        return self._native.contributors(self.id, index)

    def is_complete_within(self, index: int, timeout_s: float) -> bool:
        """Waits so long at most for the result of a pushed tensor; if it is there, it counts as pulled.

        Never for more than half of what a wait of the session may take: who goes on then is to be told of a timeout.
        """
        if self._slots is None:
            raise self._closed_error()
        timeout_s = min(timeout_s, self._client.timeout_s / 2)
        status = self._native.pull(self.id, index, 0, timeout_s)
        if status == _native.WaitStatus.TIMED_OUT:
            return False
        if status != _native.WaitStatus.DONE:
            self._client.check(status, lambda: self._describe_wait(index), timeout_s=timeout_s)
        return True

    def pull_all(self, timeout_s: float = 0.0) -> list[int]:
        """Waits for every tensor that was pushed and not pulled; returns how many workers contributed to each.

        Args:
            timeout_s: How long at most; 0 for as long as any wait of the session.
        """
        if self._slots is None:
            raise self._closed_error()
        timeout_s = timeout_s or self._client.timeout_s
        self.check(self._native.pull_all(self.id, timeout_s), timeout_s=timeout_s)
        contributors = self._native.all_contributors(self.id)
        if self._own_path is not None:
            self._own_path.reduce(self._own_shards, contributors)
        if self._on_step is not None:
            self._on_step(contributors)
        return contributors

    def watch(
        self,
        on_push: Callable[[Sequence[int]], None] | None,
        on_step: Callable[[Sequence[int]], None] | None,
    ) -> None:
        """Has functions called with the tensors of each push, and when everything of a step has been pulled.

        Args:
            on_push: Runs in the hot path; None for none.
            on_step: Runs at the end of pull_all(), on every worker after the same step, with what that returns; None
                for none.
        """
        self._on_push = on_push
        self._on_step = on_step

    def measures(self) -> list[GradientMeasure]:
        """What was measured of each tensor, alike for all workers; its last push was with MEASURE, and was pulled."""
        return [
            GradientMeasure(
                sum_of_squares=squares,
                first_nonfinite=None
                if client == _native.NOBODY
                else self._client.ranks[client]
                if client >= 0
                else EVERYBODY,
            )
            for squares, client in self._native.measures(self.id)
        ]

    def use_own_path(self, ways: Mapping[int, str]) -> None:
        """Has the workers reduce these shards themselves from the next push on, and memory devices all others.

        Every worker calls it alike, between two steps. Results do not change by it.

        Args:
            ways: How each of them is reduced: "ring", "all-gather" or "all-to-all". In the host's memory, where
                they go through no link, all is done by "all-to-all".

        Raises:
            ValueError: If cannot_use_own_path() has a reason, or there was no open_node_barrier().
        """
        if reason := self.cannot_use_own_path():
            raise ValueError(f"{self.name}: workers cannot reduce themselves: {reason}")
        if ways and self._own_path is None and self._client.emulation is None:
            self._own_path = HostDirectAllReduce(self._native, self.id, self.num_workers, self.meeting)
        shards = self._schema.partition().shards
        self._own_shards = {shard: shards[shard].tensor for shard in ways}
        flags = [_OWN_PATH_FLAGS[ways[shard]] if shard in ways else 0 for shard in range(len(shards))]
        self._native.set_path_flags(self.id, flags)

    def needs_memory_devices(self) -> str:
        """What else memory devices are for here than reducing tensors, in words; "" for nothing."""
        if self._client.emulation is not None:
            return "its links are those of another machine"
        if self._kept is not None:
            return "memory devices update its parameters"
        if self._rows is not None:
            return "it has tables, of which only rows travel"
        return ""

    def open_node_barrier(self) -> None:
        """Makes `meeting`; every worker calls it alike, before it works on anything else."""
        self._meeting = self._client.open_node_barrier(self.name, max(len(self.specs), 8))

    @property
    def meeting(self) -> NodeBarrier:
        """Where the workers come together over this group.

        Raises:
            ValueError: Before open_node_barrier().
        """
        if self._meeting is None:
            raise ValueError(f"{self.name} has no meeting")
        return self._meeting

    @property
    def is_watched(self) -> bool:
        """Whether somebody is told of each step, for which every worker has to pull_all()."""
        return self._on_step is not None

    @property
    def num_workers(self) -> int:
        """Of this node."""
        return len(self._client.ranks)

    def cannot_use_own_path(self) -> str:
        """Why the workers cannot reduce tensors of this group themselves; "" if they can."""
        if self.gpu is not None:
            return "they are in the memory of a GPU"
        if self._client.emulation is not None:
            return ""
        if not self._schema.is_open:
            return "they do not see each other's slots of it"
        if self._rows is not None:
            return "it has tables, of which only rows travel"
        if self._pulls_singly:
            return "its tensors are pulled one by one, and not all together at the end of a step"
        return ""

    @property
    def num_shards(self) -> int:
        """Of a step."""
        return len(self._schema.partition().shards)

    def shard_sizes(self) -> list[int]:
        """Bytes of each shard of a step."""
        shards = self._schema.partition().shards
        return [shard.num_elements * ITEM_BYTES[self.specs[shard.tensor].dtype] for shard in shards]

    def tensors_of_shards(self) -> list[int]:
        """The tensor that each shard of a step is a piece of."""
        return [shard.tensor for shard in self._schema.partition().shards]

    def close(self) -> None:
        """Gives the group up; its memory is freed when every worker has. Idempotent."""
        if self._slots is not None:
            self.close_gpu_transfers()
            if self._reservations is not None:
                self._reservations.close()
            self._slots = self._kept = self._rows = self._distant = None
            for meeting in (self._meeting, self._own_parameters):
                if meeting is not None:
                    meeting.close()
            self._own_parameters = None
            self._client.release(self.id)
            _native.cuda_unmap_unused()

    def close_gpu_transfers(self) -> None:
        """Ends what is under way on a GPU. Idempotent."""
        if self.gpu is not None:
            self.gpu.close()

    def check(self, status: _native.WaitStatus, *, timeout_s: float) -> None:
        """Raises what has happened, unless `status` is a good end.

        Args:
            status: Of a native call that waits for tensors of this group.
            timeout_s: How long it would have waited.
        """
        self._client.check(status, self.describe_pending, timeout_s=timeout_s)

    def check_open(self) -> None:
        """Raises SessionClosedError if the group is closed."""
        if self._slots is None:
            raise self._closed_error()

    def tell_pushed(self, tensors: Sequence[GpuTensor]) -> None:
        """Has whoever watches know that these were pushed from a GPU."""
        if self._on_push is not None:
            self._on_push([tensor[0] for tensor in tensors])

    def _memory_kept(self) -> OptimizerMemory:
        if self._slots is None:
            raise self._closed_error()
        if self._kept is None:
            raise ValueError(f"{self.name} was registered without an optimizer")
        return self._kept

    def is_pending(self) -> bool:
        """Whether something was pushed of which the result is not there yet."""
        return self._slots is not None and any(map(self.is_late, range(len(self.specs))))

    def late_clients(self) -> set[int]:
        """The workers of the node, by client number, that have not pushed what this one waits for."""
        if self._slots is None:
            return set()
        late = filter(self.is_late, range(len(self.specs)))
        return {client for index in late for client in self._native.missing_clients(self.id, index)}

    def awaited_by(self, client: int) -> str:
        """The first tensor that another worker of the node has pushed more often than this one; "" for none."""
        if self._slots is None:
            return ""
        for index, spec in enumerate(self.specs):
            if client in self._native.clients_ahead(self.id, index):
                return f"{spec.name!r} of {self.name}"
        return ""

    def describe_pending(self) -> str:
        """What was pushed of which the result is not there yet, and who has not pushed it; three tensors at most."""
        late = [index for index in range(len(self.specs)) if self.is_late(index)]
        if not late:
            return f"tensors of {self.name}, which the workers reduce themselves by NCCL"
        waits = "; ".join(map(self._describe_wait, late[:3]))
        return waits + (f"; and {len(late) - 3} more tensors" if len(late) > 3 else "")

    def _describe_wait(self, index: int) -> str:
        ranks = self._client.ranks
        missing = [ranks[client] for client in self._native.missing_clients(self.id, index)]
        if self._client.rank in missing:
            device = self._client.describe_device(self.routing.bw_proxy)
            whom = f"pushed, but not taken by memory device {device}; is that process stopped?"
        elif missing:
            whom = f"not pushed by worker(s) {', '.join(map(str, missing))}"
        else:
            whom = self._client.describe_progress()
        return f"{self.specs[index].name!r} of {self.name} ({whom})"

    def _closed_error(self) -> SessionClosedError:
        what = "the session" if self._client.is_closed else f"tensor group {self.name!r}"
        return SessionClosedError(f"worker {self._client.rank}: {what} is closed")

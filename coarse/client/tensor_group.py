"""Tensors that a worker has registered with the memory devices, and that it pushes and pulls."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from coarse.client.direct_allreduce import HostDirectAllReduce, NodeBarrier
from coarse.client.gpu.gpu_transfers import NOTHING, GpuTensor, GpuTransfers
from coarse.client.gpu.nccl_direct_allreduce import NcclDirectAllReduce
from coarse.client.interfaces import HomeDevice, Waiter
from coarse.client.membership.members import Members
from coarse.client.memory.optimizer_memory import OptimizerMemory
from coarse.client.memory.reservations import Reservations
from coarse.client.memory.row_memory import RowMemory
from coarse.client.memory.slot_opener import DistantSlots
from coarse.client.memory.snapshots import PoolStatistics, Snapshot
from coarse.client.memory.tensor_bytes import GpuBytes, TensorBytes, gpu_context
from coarse.emulation.machine import Emulation
from coarse.errors import ProtocolError, SessionClosedError, SnapshotsBusyError
from coarse.kernels import _native
from coarse.profiler.routing import RoutingTable
from coarse.schema import ITEM_BYTES
from coarse.wire.failure_messages import overwritten_counter
from coarse.wire.messages import Message
from coarse.wire.registration import PARAMETERS, SLOTS, STATES, GroupSchema, RecoveredUpdates, WorkerPlaces

if TYPE_CHECKING:
    from coarse.arrays import AnyArray
    from coarse.client.memory.private_writes import PrivateWrites

_DIRECT_ALLREDUCE_FLAGS = {
    "ring": _native.DIRECT_ALLREDUCE,
    "all-gather": _native.DIRECT_ALLREDUCE | _native.ALL_GATHER,
    "all-to-all": _native.DIRECT_ALLREDUCE | _native.ALL_TO_ALL,
    "two-way-ring": _native.DIRECT_ALLREDUCE,
    "tree": _native.DIRECT_ALLREDUCE,
    "two-level": _native.DIRECT_ALLREDUCE,
}
_RELAYS = {"two-way-ring": _native.TWO_WAY_RING, "tree": _native.TREE, "two-level": _native.TWO_LEVEL}


class UpdateKind(enum.IntEnum):
    """The effect of a push on the parameter of a tensor."""

    NONE = 0
    """No update: the slots of all workers become the result."""
    UPDATE = _native.UPDATE
    """The result updates the parameter; slots stay as they are."""
    UPDATE_BY_MEAN = _native.UPDATE | _native.REDUCED
    """The slots, whose contents are equal on every worker, update the parameter."""
    MEASURE = _native.MEASURE
    """Like NONE, but the result is measured (see measures()). Only for a group with an optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMeasure:
    """The memory devices' measurements of the mean of one tensor, taken while they reduced it.

    Args:
        sum_of_squares: Sum of the squares of its elements, in float64; 0 if no worker contributed.
        first_nonfinite: Source of NaN or Inf in the mean: the rank of the first worker with such an element in its
            contribution; EVERYBODY if finite contributions overflowed in the mean, or if the source is unknown, as
            with several nodes; None if the mean is finite.
    """

    sum_of_squares: float
    first_nonfinite: int | None


EVERYBODY: int = _native.EVERYBODY
"""A value of GradientMeasure.first_nonfinite, in place of a rank."""


class GroupClient(Waiter, HomeDevice, Protocol):
    """The part of a client that its tensor groups use."""

    @property
    def number(self) -> int:
        """This worker's client number."""

    @property
    def names(self) -> Sequence[str]:
        """Descriptions of this node's workers, by client number."""

    @property
    def warn_after_s(self) -> float:
        """Seconds that a wait may take before it is logged; 0 disables logging."""

    @property
    def routing(self) -> RoutingTable:
        """The routes of shards to memory devices."""

    @property
    def emulation(self) -> Emulation | None:
        """The emulated links; None for real links."""

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended."""

    @property
    def members(self) -> Members:
        """The workers of the session that go on."""

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker has the place of a lost one, and does not take part yet."""

    @property
    def may_lose_workers(self) -> bool:
        """Whether the session goes on without lost workers."""

    @property
    def has_other_nodes(self) -> bool:
        """Whether some workers of the session are on other nodes."""

    @property
    def num_ranks(self) -> int:
        """Workers of all nodes, if there are several and they go on without lost ones; else 0."""

    def describe_device(self, device: int) -> str:
        """A memory device of this node, in words."""

    def describe_progress(self) -> str:
        """The progress of the other nodes, in words."""

    def tell_devices(self, message: Message) -> None:
        """Sends a message to all memory devices."""

    def open_node_barrier(self, name: str, most_numbers: int) -> NodeBarrier:
        """Opens a barrier of the node's workers."""

    def release(self, group: int) -> None:
        """Releases a tensor group."""


class TensorGroup:
    """Tensors that were registered together, each with a slot of device memory that only this worker writes.

    A worker pushes a tensor, and pulls it before it pushes it again. In between, the slot belongs to the memory
    devices. Thread safety: one caller at a time, from any thread.
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
        """Contents of parameters and states kept since the last attempt; None if they are new."""
        self.num_steps = self.num_pulls = 0
        """Finished calls of pull_all(), except those after continue_step(), and of pull()."""
        self._client = client
        self._native = native
        self._schema = schema
        self._direct_shards: dict[int, int] = {}  # the tensor of each
        self._direct_allreduce: HostDirectAllReduce | None = None
        self._barrier: NodeBarrier | None = None
        self._pulls_singly = False
        self._continues_step = False
        self._on_push: Callable[[Sequence[int]], None] | None = None
        self._on_step: Callable[[Sequence[int]], None] | None = None
        self.gpu: GpuTransfers | None = None
        """Transfers of tensors in GPU memory; set by open_gpu_transfers()."""
        self.nccl = NcclDirectAllReduce(self, native)
        """Direct all-reduce of tensors on GPUs."""
        self._offsets = tensor_offsets
        self._slots: TensorBytes | None = slots
        self._kept = kept
        self._own_parameters: PrivateWrites | None = None
        self._rows = rows
        self._distant = distant  # slots on another GPU
        self._reservations = reservations
        self.places = places or WorkerPlaces()
        """How many of the node's workers had these tensors on GPUs, and how many used NCCL for another group."""

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._client.rank

    @property
    def schema(self) -> GroupSchema:
        """The schema by which the group was registered."""
        return self._schema

    @property
    def is_distant(self) -> bool:
        """Whether this worker's slots lie on another GPU than its tensors."""
        return self._distant is not None

    @property
    def is_routed_by_itself(self) -> bool:
        """Whether the group has its own routes, independent of the session's."""
        return bool(self._schema.routes)

    @property
    def routing(self) -> RoutingTable:
        """The routes of this worker's shards to memory devices."""
        return self._schema.routes[self._client.number] if self._schema.routes else self._client.routing

    @property
    def is_on_gpu(self) -> bool:
        """Whether this worker sees its slots on a GPU: buffer() returns GpuBytes, and push() copies nothing."""
        return isinstance(self._slots, GpuBytes) and self._distant is None

    @property
    def address_on_gpu(self) -> int:
        """Address of this worker's slots on its GPU; 0 if it has no GPU or its GPU cannot reach them."""
        if self._distant is not None:
            return self._distant.memory.address if self._distant.is_reached else 0
        return self._slots.address if isinstance(self._slots, GpuBytes) else 0

    @property
    def rows(self) -> RowMemory:
        """This worker's rows of the group's tables, and their means.

        Raises:
            ValueError: If the group has no tables.
        """
        if self._slots is None:
            raise self._closed_error()
        if self._rows is None:
            raise ValueError(f"{self.name} has no tables")
        return self._rows

    def buffer(self, index: int) -> TensorBytes:
        """The writable bytes of a tensor's slot; the memory stays valid while references to it exist.

        Raises:
            ValueError: For a table, which has no slot.
        """
        if self._slots is None:
            raise self._closed_error()
        if self.specs[index].row_elements:
            raise ValueError(f"{self.specs[index].name!r} of {self.name} is a table; push its rows instead")
        start = self._offsets[index]
        return self._slots[start : start + self.specs[index].nbytes]

    def reserve_slots(self) -> None:
        """Reserves the memory of this worker's slots, if registration left this to the workers. Idempotent.

        Call it before the first push.

        Raises:
            OutOfDeviceMemoryError: If the memory is not available.
        """
        if self._reservations is not None:
            self._reservations.reserve(SLOTS)

    def reserve_parameter(self, index: int) -> None:
        """Reserves a parameter's memory, before any worker writes it. Only for a group with an optimizer."""
        if self._reservations is not None:
            begin = self._memory_kept().parameter_offset(index)
            self._reservations.reserve_part(PARAMETERS, begin, begin + self.specs[index].nbytes)

    def reserve_states(self) -> None:
        """Reserves the memory of all states, before the first update."""
        if self._reservations is not None:
            self._reservations.reserve(STATES)

    def parameter(self, index: int) -> TensorBytes:
        """The writable bytes of a parameter, shared by all workers of the node. Only for a group with an optimizer.

        Memory devices write to it only between this worker's push with UPDATE or UPDATE_BY_MEAN and its pull.
        """
        return self._memory_kept().parameter(index, self.specs[index].nbytes)

    def map_own_parameters(self) -> str:
        """Prepares open_own_parameters(); returns why a private view of parameters is impossible, "" if possible."""
        return self._memory_kept().map_own_parameters()

    def open_own_parameters(self, *, publishes: bool) -> PrivateWrites:
        """This worker's own view of the parameters. Collective; map_own_parameters() must return "" on every worker.

        Args:
            publishes: As for PrivateWrites.
        """
        lengths = [spec.nbytes for spec in self.specs]
        barrier = self._client.open_node_barrier(f"the values written to {self.name}", 2)
        self._own_parameters = self._memory_kept().open_own_parameters(lengths, barrier, publishes=publishes)
        return self._own_parameters

    @property
    def spans_nodes(self) -> bool:
        """Whether some workers are on other nodes."""
        return self._client.has_other_nodes

    @property
    def are_parameters_elsewhere(self) -> bool:
        """Whether parameters do not lie with this worker's model, but on the host or another GPU."""
        return self._memory_kept().are_parameters_elsewhere

    def updated_parameter(self, index: int) -> int:
        """Address from which a GPU copies a parameter that lies elsewhere, for GpuTensor; 0 if it cannot copy."""
        return self._memory_kept().result(index)

    def slot(self, index: int) -> tuple[int, int]:
        """Start and end of a tensor's slot, in bytes from the start of this worker's slots; the end is exclusive."""
        return self._offsets[index], self._offsets[index] + self.specs[index].slot_bytes

    def note_ready(self, index: int) -> None:
        """Records in the timeline that a tensor is about to be pushed."""
        _native.record_ready(self._native.timeline_session, self.id, index)

    def is_late(self, index: int) -> bool:
        """Whether a tensor was pushed but not pulled, and its result is not ready."""
        return self._native.is_late(self.id, index)

    def state(self, index: int, number: int) -> TensorBytes:
        """The writable bytes of a parameter's `number`-th state, float32; like parameter(). Mapped only while in use.

        The states of a 16-bit parameter are followed by its master weights. An update starts from a master weight
        wherever the parameter is its rounded value.
        """
        length = self.specs[index].num_elements * ITEM_BYTES["float32"]
        return self._memory_kept().kept_array(index, number)[:length]

    def settings(self) -> memoryview[Any]:
        """This worker's optimizer settings, a SETTINGS_DTYPE of coarse.client.update_settings for each tensor.

        Only for a group with an optimizer. Write them before pushing an update; do not change them before its pull.
        """
        return self._memory_kept().settings

    def snapshot(self) -> Snapshot:
        """Begins a snapshot of parameters and states: one addition to a counter. Only for a group with an optimizer.

        Any worker may call it alone, between a pull and its next push: no update runs then.

        Raises:
            SnapshotsBusyError: If the maximum number of snapshots is held.
            ProtocolError: If a worker has overwritten the snapshot counter.
        """
        trigger = self._memory_kept().snapshots
        number = trigger.begin()
        if number == 0 and (said := trigger.impossible()):
            raise ProtocolError(overwritten_counter(self.name, said, self._client.ranks))
        if number == 0:
            raise SnapshotsBusyError(
                f"{self.name}: {_native.MOST_SNAPSHOTS} snapshots are already held, the maximum; release one first"
            )
        return Snapshot(self._client, self.id, number)

    def warm_snapshots(self) -> None:
        """Requests memory for a whole snapshot in advance; returns at once. Only for a group with an optimizer."""
        self._memory_kept()
        self._client.tell_devices({"type": "warm_snapshots", "group": self.id})

    def updates(self) -> tuple[int, list[int]]:
        """The optimizer's last step, and the number of each tensor's last update; no update may be running."""
        return self._native.updates(self.id)

    def keep_snapshots(self) -> None:
        """Copies the data that snapshots refer to; call it before a worker writes to parameters or states itself."""
        self._memory_kept()
        message = {"type": "keep_snapshots", "group": self.id}
        self._client.ask_home(message, "snapshots_kept", f"snapshots of {self.name}")

    def snapshot_statistics(self) -> PoolStatistics:
        """Memory and copying cost of snapshots' old versions. Only for a group with an optimizer."""
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
        source: int | AnyArray = 0,
        update: UpdateKind = UpdateKind.NONE,
    ) -> None:
        """Contributes a tensor to the next synchronisation.

        Args:
            index: Position in `specs`.
            present: False contributes nothing, which counts like zeros.
            joined: True contributes nothing and does not count in a mean: this worker has run out of inputs.
            source: Array, or address of bytes in the host's memory, to copy to the slot first; 0 if the slot already
                holds the tensor. Arrays are those of Session.all_reduce(), of the tensor's dtype and length, or its
                bytes as uint8; also read-only.
            update: Effect on the parameter, by the settings(); the same on every worker.

        Raises:
            ValueError, TypeError, GpuUnavailableError: If the array cannot be taken; says what to pass instead.
        """
        if not isinstance(source, int):
            with self._address_of(index, source, writes=False) as address:
                self.push(index, present=present, joined=joined, source=address, update=update)
            return
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
        """Switches to tensors in GPU memory; use the returned GpuTransfers instead of push() afterwards.

        Pins slots and parameters in the host's memory. If is_on_gpu, the computing stream writes to the slots and
        reads them. This GPU copies to slots on another GPU; buffer() must not be used after that.

        Args:
            context: Context of the GPU.
            timeout_s: Longest wait for results in seconds; 0 stands for the session's timeout.

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
            # Pinning has allocated all pages of the view, which is no longer needed.
            self._slots = GpuBytes(distant.memory, 0, distant.memory.num_bytes)
        return self.gpu

    def take_slots(self, other: TensorGroup) -> None:
        """Continues with the slots of another group, which was registered for the same tensors.

        Call it between two steps, with transfers open; these go on to and from the new slots. `other` must not be
        used any more.
        """
        assert self.gpu is not None
        context = self.gpu.context
        self.close_gpu_transfers()
        self.id, self._schema, self._offsets = other.id, other._schema, other._offsets
        self._slots, self._distant, self._reservations = other._slots, other._distant, other._reservations
        self.open_gpu_transfers(context)

    def flush(self) -> None:
        """Flushes pending sends, which are delayed to save wake-ups; pulling also does this."""
        self._native.flush()

    def pull(self, index: int, *, destination: int | AnyArray = 0) -> int:
        """Waits for the result of a pushed tensor.

        Args:
            index: Position in `specs`.
            destination: Array, or address in the host's memory, to which to copy the result; 0 leaves it only in the
                slot. Arrays are as for push(), but writable.

        Returns:
            Number of workers that contributed; 0 means that the slot is unchanged.

        Raises:
            ValueError, TypeError, GpuUnavailableError: As for push(); the tensor was not pulled.
        """
        if not isinstance(destination, int):
            with self._address_of(index, destination, writes=True) as address:
                return self.pull(index, destination=address)
        if self._slots is None:
            raise self._closed_error()
        if self._direct_allreduce is not None and index in self._direct_shards.values():
            raise ValueError(
                f"{self.name}: the workers reduce {self.specs[index].name!r} themselves, and only pull_all() "
                "returns the result; set COARSE_DUAL_SYNC=off to pull tensors one by one"
            )
        self._pulls_singly = True
        status = self._native.pull(self.id, index, destination, self._client.timeout_s)
        if status != _native.WaitStatus.DONE:
            self._client.check(status, lambda: self._describe_wait(index))
        self.num_pulls += 1
        return self._native.contributors(self.id, index)

    def is_complete_within(self, index: int, timeout_s: float) -> bool:
        """Waits at most `timeout_s` for the result of a pushed tensor; a result that is ready counts as pulled.

        Waits at most half of the session's timeout, so that a caller that continues still receives a timeout error.
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
        """Waits for every tensor that was pushed and not pulled; returns the number of contributors to each.

        Args:
            timeout_s: Longest wait in seconds; 0 stands for the session's timeout.
        """
        if self._slots is None:
            raise self._closed_error()
        timeout_s = timeout_s or self._client.timeout_s
        self.check(self._native.pull_all(self.id, timeout_s), timeout_s=timeout_s)
        if self._client.may_lose_workers:
            self._client.members.remove(self.absent_workers())
        self.num_steps += not self._continues_step
        self._continues_step = False
        contributors = self._native.all_contributors(self.id)
        if self._direct_allreduce is not None:
            self._direct_allreduce.reduce(self._direct_shards, contributors)
        if self._on_step is not None:
            self._on_step(contributors)
        return contributors

    def absent_workers(self) -> set[int]:
        """Ranks of workers that were lost before they contributed to the first tensor, whose result was pulled.

        Equal on all workers after the same step.
        """
        if self._client.num_ranks:
            return set(self._native.absent_ranks(self.id))
        return {self._client.ranks[each] for each in self._native.stand_ins(self.id)}

    def contributors(self, index: int) -> int:
        """Number of workers that contributed to the last result of a tensor; if shards differ, the fewest."""
        return self._native.contributors(self.id, index)

    def continue_step(self) -> None:
        """Says that the next pull_all() is for updates by means that one has pulled already: both are of one step."""
        self._continues_step = True

    def watch(
        self,
        on_push: Callable[[Sequence[int]], None] | None,
        on_step: Callable[[Sequence[int]], None] | None,
    ) -> None:
        """Sets callbacks for each push, and for the end of each step, when all its tensors have been pulled.

        Args:
            on_push: Receives the tensors of a push; runs in the hot path. None removes it.
            on_step: Receives the result of pull_all() and runs at its end, on every worker after the same step. None
                removes it.
        """
        self._on_push = on_push
        self._on_step = on_step

    def measures(self) -> list[GradientMeasure]:
        """The measures of each tensor, equal on all workers; its last push used MEASURE and was pulled."""
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

    def use_direct_allreduce(self, ways: Mapping[int, str]) -> None:
        """Reduces these shards by direct all-reduce from the next push on; memory devices reduce all others.

        Every worker calls it with the same argument, between two steps. Results stay the same.

        Args:
            ways: The way of each shard, of coarse.profiler.direct_allreduce.WAYS_OVER_NODES. In the host's memory,
                where shards cross no link, all use "all-to-all".

        Raises:
            ValueError: If cannot_use_direct_allreduce() returns a reason, or open_node_barrier() was not called.
        """
        if reason := self.cannot_use_direct_allreduce():
            raise ValueError(f"{self.name}: workers cannot reduce its tensors themselves: {reason}")
        if ways and self._direct_allreduce is None and self._client.emulation is None:
            self._direct_allreduce = HostDirectAllReduce(
                self._native, self.id, self.num_workers, self.barrier
            )
        shards = self._schema.partition().shards
        self._direct_shards = {shard: shards[shard].tensor for shard in ways}
        flags = [_DIRECT_ALLREDUCE_FLAGS[ways[shard]] if shard in ways else 0 for shard in range(len(shards))]
        relays = [_RELAYS.get(ways.get(shard, ""), 0) for shard in range(len(shards))]
        self._native.set_direct_allreduce_flags(self.id, flags, relays)

    def needs_memory_devices(self) -> str:
        """Work of the memory devices for this group besides reducing tensors, in words; "" for none."""
        if self._client.emulation is not None:
            return "its links are emulated"
        if self._kept is not None:
            return "memory devices update its parameters"
        if self._rows is not None:
            return "it has tables, and workers send only some of their rows"
        return ""

    def open_node_barrier(self) -> None:
        """Opens `barrier`; every worker calls it before any other work."""
        self._barrier = self._client.open_node_barrier(self.name, max(len(self.specs), 8))

    @property
    def barrier(self) -> NodeBarrier:
        """The node barrier of this group.

        Raises:
            ValueError: Before open_node_barrier().
        """
        if self._barrier is None:
            raise ValueError(f"{self.name}: open_node_barrier() was not called")
        return self._barrier

    @property
    def is_watched(self) -> bool:
        """Whether a callback receives each step; then every worker must call pull_all()."""
        return self._on_step is not None

    @property
    def num_workers(self) -> int:
        """Number of workers on this node."""
        return len(self._client.ranks)

    def cannot_use_direct_allreduce(self) -> str:
        """Why direct all-reduce cannot reduce tensors of this group; "" if it can."""
        if self.gpu is not None:
            return "its tensors are in the memory of a GPU"
        if self._client.emulation is not None:
            return ""
        if not self._schema.is_open:
            return "they cannot access each other's slots of this group"
        if self._rows is not None:
            return "it has tables, and workers send only some of their rows"
        if self._pulls_singly:
            return "its tensors are pulled one by one, not all together at the end of a step"
        return ""

    @property
    def num_shards(self) -> int:
        """Number of shards of a step."""
        return len(self._schema.partition().shards)

    def shard_sizes(self) -> list[int]:
        """Bytes of each shard of a step."""
        shards = self._schema.partition().shards
        return [shard.num_elements * ITEM_BYTES[self.specs[shard.tensor].dtype] for shard in shards]

    def tensors_of_shards(self) -> list[int]:
        """The tensor of each shard of a step."""
        return [shard.tensor for shard in self._schema.partition().shards]

    def close(self) -> None:
        """Releases the group; its memory is freed when every worker has released it. Idempotent."""
        if self._slots is not None:
            self.close_gpu_transfers()
            if self._reservations is not None:
                self._reservations.close()
            self._slots = self._kept = self._rows = self._distant = None
            for barrier in (self._barrier, self._own_parameters):
                if barrier is not None:
                    barrier.close()
            self._own_parameters = None
            self._client.release(self.id)
            _native.cuda_unmap_unused()

    def close_gpu_transfers(self) -> None:
        """Ends transfers on a GPU. Idempotent."""
        if self.gpu is not None:
            self.gpu.close()

    def check(self, status: _native.WaitStatus, *, timeout_s: float) -> None:
        """Raises the error behind `status`, unless it is a success.

        Args:
            status: Status of a native call that waits for tensors of this group.
            timeout_s: Timeout of that call.
        """
        self._client.check(status, self.describe_pending, timeout_s=timeout_s)

    def check_open(self) -> None:
        """Raises SessionClosedError if the group is closed."""
        if self._slots is None:
            raise self._closed_error()

    def tell_pushed(self, tensors: Sequence[GpuTensor]) -> None:
        """Passes tensors that were pushed from a GPU to the on_push callback."""
        if self._on_push is not None:
            self._on_push([tensor[0] for tensor in tensors])

    def _address_of(self, index: int, array: AnyArray, *, writes: bool) -> AbstractContextManager[int]:
        from coarse.arrays import tensor_address  # needs numpy

        if isinstance(self._slots, GpuBytes):
            raise ValueError(
                f"{self.name}: this worker's slots lie on a GPU; copy to and from them by "
                "torch.from_dlpack(buffer(index)), or register without gpu="
            )
        return tensor_address(array, self.specs[index], self.name, writes=writes)

    def _memory_kept(self) -> OptimizerMemory:
        if self._slots is None:
            raise self._closed_error()
        if self._kept is None:
            raise ValueError(f"{self.name} was registered without an optimizer")
        return self._kept

    def is_pending(self) -> bool:
        """Whether the result of any pushed tensor is not ready."""
        return self._slots is not None and any(map(self.is_late, range(len(self.specs))))

    def late_clients(self) -> set[int]:
        """Client numbers of the node's workers that have not pushed a tensor for which this worker waits."""
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
        """Up to three pushed tensors without a result, and the workers that have not pushed them."""
        late = [index for index in range(len(self.specs)) if self.is_late(index)]
        if not late:
            return f"tensors of {self.name}, which the workers reduce themselves with NCCL"
        waits = "; ".join(map(self._describe_wait, late[:3]))
        return waits + (f"; and {len(late) - 3} more tensors" if len(late) > 3 else "")

    def _describe_wait(self, index: int) -> str:
        ranks = self._client.ranks
        missing = [ranks[client] for client in self._native.missing_clients(self.id, index)]
        if self._client.rank in missing:
            device = self._client.describe_device(self.routing.bw_proxy)
            whom = (
                f"pushed, but not processed by memory device {device}; check whether that process is stopped"
            )
        elif missing:
            whom = f"not pushed by worker(s) {', '.join(map(str, missing))}"
        else:
            whom = self._client.describe_progress()
        return f"{self.specs[index].name!r} of {self.name} ({whom})"

    def _closed_error(self) -> SessionClosedError:
        what = "the session" if self._client.is_closed else f"tensor group {self.name!r}"
        return SessionClosedError(f"worker {self._client.rank}: {what} is closed")

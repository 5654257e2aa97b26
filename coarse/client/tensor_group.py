"""Tensors that are registered with the memory devices, as a worker pushes and pulls them."""

from __future__ import annotations

import ctypes
import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from coarse.client.optimizer_memory import OptimizerMemory
from coarse.client.own_path import HostOwnPath, Meeting, NcclOwnPath, less_accurate_by_nccl
from coarse.client.row_memory import RowMemory
from coarse.client.schema import ITEM_BYTES
from coarse.client.snapshots import PoolStatistics, Snapshot
from coarse.client.tensor_bytes import GpuBytes, TensorBytes
from coarse.errors import CoarseError, NcclFailedError, SessionClosedError, SnapshotsBusyError
from coarse.kernels import _native
from coarse.profiler.routing import RoutingTable
from coarse.proxy.registration import GroupSchema, RecoveredUpdates, WorkerPlaces

if TYPE_CHECKING:
    from coarse.client.client import Client

logger = logging.getLogger(__name__)

_OWN_PATH_FLAGS = {
    "ring": _native.OWN_PATH,
    "all-gather": _native.OWN_PATH | _native.ALL_GATHER,
    "all-to-all": _native.OWN_PATH | _native.ALL_TO_ALL,
}

GpuTensor = tuple[int, int, int, int, int]
"""A tensor in the memory of a GPU: its number, flags of the contribution, the address from which it is copied to its
slot (0 for none), that to which its result is copied (0 for none), and TensorGroup.updated_parameter() if that is the
result (0 for the slot)."""


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


class TensorGroup:
    """Tensors that were registered together: a slot of device memory for each, which only this worker writes.

    A tensor is pushed, and pulled before it is pushed again; in between its slot belongs to the memory devices.
    Thread safety: one caller at a time, whichever thread it is.
    """

    def __init__(
        self,
        client: Client,
        native: _native.Client,
        group: int,
        schema: GroupSchema,
        tensor_offsets: Sequence[int],
        slots: TensorBytes,
        kept: OptimizerMemory | None = None,
        recovered: RecoveredUpdates | None = None,
        rows: RowMemory | None = None,
        reached: _native.CudaMemory | None = None,
        places: WorkerPlaces | None = None,
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
        self._own_path: HostOwnPath | None = None
        self._meeting: Meeting | None = None
        self._pulls_singly = False
        self._on_push: Callable[[Sequence[int]], None] | None = None
        self._on_step: Callable[[Sequence[int]], None] | None = None
        self._gpu: _native.GpuTransfers | None = None
        self._gpu_stream = 0
        self.gpu_context: _native.CudaContext | None = None
        """Of the GPU from which tensors are pushed; None where they are not."""
        self._nccl: NcclOwnPath | None = None
        self._why_no_nccl = ""
        self.nccl_objection: Callable[[], str] = str
        """Asked before anything is reduced by NCCL: why not, "" for no reason."""
        self._is_joined = False  # since the last push_from_gpu()
        self._offsets = tensor_offsets
        self._slots: TensorBytes | None = slots
        self._kept = kept
        self._rows = rows
        self._reached = reached  # slots on another GPU, as this worker's reaches them
        self.places = places or WorkerPlaces()
        """How many workers of the node have these tensors on GPUs, and had a group of claims_nccl then."""
        self.claims_nccl = False
        """Whether NCCL may reduce these tensors, and no others of the session."""

    @property
    def is_routed_by_itself(self) -> bool:
        """Whether slots lie where it has routes to, whatever the session's are."""
        return bool(self._schema.routes)

    @property
    def routing(self) -> RoutingTable:
        """Which memory device takes which of this worker's shards."""
        return self._schema.routes[self._client.number] if self._schema.routes else self._client.routing

    @property
    def gpu_stream(self) -> int:
        """Handle of the stream that computes what is pushed from a GPU: that of the last push or join."""
        return self._gpu_stream

    @property
    def is_on_gpu(self) -> bool:
        """Whether this worker sees its slots on a GPU: buffer() gives GpuBytes, and push() copies nothing."""
        return isinstance(self._slots, GpuBytes) and self._reached is None

    @property
    def address_on_gpu(self) -> int:
        """Where this worker's GPU reaches its slots; 0 if it has none, or does not reach them."""
        if isinstance(self._slots, GpuBytes):
            return self._slots.address
        return 0 if self._reached is None else self._reached.address

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

    def parameter(self, index: int) -> TensorBytes:
        """The writable bytes of a parameter, which all workers of the node share. Of a group with an optimizer.

        Memory devices write to it between this worker's push with UPDATE or UPDATE_BY_MEAN and its pull, never else.
        """
        return self._memory_kept().parameter(index, self.specs[index].nbytes)

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
        """
        number = self._memory_kept().snapshots.begin()
        if number == 0:
            raise SnapshotsBusyError(
                f"{self.name}: {_native.MOST_SNAPSHOTS} snapshots are held already; release one of them first"
            )
        return Snapshot(self._client, self.id, number)

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

    def open_gpu_transfers(self, context: _native.CudaContext, *, timeout_s: float = 0.0) -> None:
        """From now on tensors are in the memory of a GPU: push_from_gpu() and join_gpu() take the place of push().

        Slots and parameters in the host's memory are pinned. Where is_on_gpu, the stream that computes writes to the
        slots and reads them. To slots on another GPU this one copies, and buffer() must not be used any more.
        Each step ends by join_gpu(); pull_all() waits for results of memory devices, not for what GPUs do.

        Args:
            context: Of the GPU.
            timeout_s: How long results may take; 0 for as long as any wait of the session.

        Raises:
            CudaError: If memory cannot be pinned, streams of the GPU cannot wait for the host's memory, or the slots
                lie on a GPU that this one cannot reach.
        """
        if self._slots is None:
            raise self._closed_error()
        slots = (0, 0, False)
        if self._reached is not None:
            slots = self._reached.address, self._reached.num_bytes, True
        elif not self.is_on_gpu and self._client.table.is_on_gpus:
            raise _native.CudaError("memory devices are on a GPU that this one cannot reach")
        elif isinstance(self._slots, memoryview):
            slots = ctypes.addressof(ctypes.c_char.from_buffer(self._slots)), self._slots.nbytes, False
        self._gpu = _native.GpuTransfers(
            self._native,
            self.id,
            context,
            slots,
            (0, 0, False) if self._kept is None else self._kept.results(),
            timeout_s or self._client.timeout_s,
        )
        self.gpu_context = context
        if self._reached is not None:
            self._native.give_up_view(self.id)
            # Pinning has taken all pages of the view, which nobody needs any more.
            num_bytes = self._slots.nbytes
            self._slots = GpuBytes(self._reached, 0, num_bytes)

    def bring_from_gpu(self, tensors: Sequence[GpuTensor], stream: int) -> None:
        """Copies tensors to their slots as `stream` computes them, before what is pushed later is announced.

        Arguments and errors are those of push_from_gpu().
        """
        self._is_joined = False
        gpu = self._open_gpu()
        self._check_gpu(lambda: gpu.bring(tensors, stream))

    def push_from_gpu(self, tensors: Sequence[GpuTensor], stream: int) -> None:
        """Contributes tensors as `stream` computes them, and has results copied back; returns at once.

        Args:
            tensors: Their memory stays as it is until a stream has joined.
            stream: Handle of the stream that was given what computes them.

        Raises:
            CudaError: If the stream is being captured into a CUDA graph.
            MemoryDeviceLostError, WorkerLostError, SyncTimeoutError: If that has happened since the last call.
            NcclFailedError: If NCCL has failed, by which workers reduce some tensors themselves.
        """
        gpu = self._open_gpu()
        self._is_joined = False
        self._check_gpu(lambda: gpu.push(tensors, stream))
        if self._on_push is not None:
            self._gpu_stream = stream
            self._on_push([tensor[0] for tensor in tensors])

    def gpu_batch_bytes(self) -> int:
        """How much is best pushed next from a GPU at once: less as a step goes to its end, which is join_gpu()."""
        return self._open_gpu().batch_bytes

    def num_pushed_from_gpu(self) -> int:
        """Counts what was pushed from a GPU, for has_left_gpu()."""
        return self._open_gpu().num_pushed

    def has_left_gpu(self, num_pushed: int) -> bool:
        """Whether everything that was pushed by then is in its slot, so that its memory may change."""
        return self._open_gpu().has_brought(num_pushed)

    def join_gpu(self, stream: int) -> None:
        """Has what `stream` is given from now on wait for all results of what was pushed; raises as that does."""
        self._gpu_stream = stream
        gpu = self._open_gpu()
        self._check_gpu(lambda: gpu.join(stream))
        self._is_joined = True

    def check_gpu(self) -> None:
        """Raises what has happened to transfers since the last call, as push_from_gpu() does."""
        self._check_gpu(self._open_gpu().status)

    def _open_gpu(self) -> _native.GpuTransfers:
        if self._slots is None:
            raise self._closed_error()
        assert self._gpu is not None
        return self._gpu

    def _check_gpu(self, call: Callable[[], _native.WaitStatus]) -> None:
        try:
            status = call()
        except _native.NcclError as error:
            raise NcclFailedError(f"worker {self._client.rank}: {self.name}: {error}") from error
        if status != _native.WaitStatus.DONE:
            self._client.check(status, self._describe_pending)

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

    def pull_all(self, timeout_s: float = 0.0) -> list[int]:
        """Waits for every tensor that was pushed and not pulled; returns how many workers contributed to each.

        Args:
            timeout_s: How long at most; 0 for as long as any wait of the session.
        """
        if self._slots is None:
            raise self._closed_error()
        status = self._native.pull_all(self.id, timeout_s or self._client.timeout_s)
        if status != _native.WaitStatus.DONE:
            self._client.check(status, self._describe_pending)
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
            ValueError: If cannot_use_own_path() has a reason, or there was no open_meeting().
        """
        if reason := self.cannot_use_own_path():
            raise ValueError(f"{self.name}: workers cannot reduce themselves: {reason}")
        if ways and self._own_path is None and self._client.emulation is None:
            self._own_path = HostOwnPath(self._native, self.id, self.num_workers, self.meeting)
        shards = self._schema.partition().shards
        self._own_shards = {shard: shards[shard].tensor for shard in ways}
        flags = [_OWN_PATH_FLAGS[ways[shard]] if shard in ways else 0 for shard in range(len(shards))]
        self._native.set_path_flags(self.id, flags)

    def use_nccl(self, communicator: _native.NcclCommunicator, shards: Sequence[int]) -> None:
        """Has the workers reduce these shards themselves from the next push on, between their GPUs.

        As use_own_path(), but that numbers are added in the order of NCCL. While tensors go this way, every worker
        pushes all of them in each step, and ends it by join_gpu(). For one group of a session, since NCCL needs all
        of its work in one order on all workers.

        Args:
            communicator: Of the node's workers.
            shards: In the order in which all workers give them to NCCL; none for nothing any more.

        Raises:
            ValueError: If cannot_use_nccl() has a reason, or there was no open_meeting().
        """
        if reason := self.cannot_use_nccl():
            raise ValueError(f"{self.name}: workers cannot reduce by NCCL: {reason}")
        if self._nccl is None:
            assert self._gpu is not None
            slots = self.address_on_gpu if self.is_on_gpu else 0
            self._nccl = NcclOwnPath(self._native, self.id, self._gpu, slots, self.meeting, self._check_gpu)
        self._nccl.use(communicator, shards, num_shards=len(self.shard_sizes()))

    def settle_nccl(self) -> None:
        """Waits until NCCL has done what it was given; raises as join_gpu()."""
        if self._nccl is not None:
            self._nccl.settle()

    def stop_nccl(self, why: str) -> None:
        """Has memory devices reduce everything, now and later; every worker calls it alike, between two steps.

        Args:
            why: The reason that cannot_use_nccl() has from now on.
        """
        self._why_no_nccl = why
        if self._nccl is not None:
            self._nccl.stop(num_shards=len(self.shard_sizes()))

    def cannot_use_nccl(self) -> str:
        """Why the workers cannot reduce tensors of this group themselves between their GPUs; "" if they can."""
        if reason := self._why_no_nccl or self.nccl_objection():
            return reason
        if self._gpu is None:
            return "its tensors are copied by the processor"
        if self._client.emulation is not None:
            return "its links are those of another machine"
        if self._kept is not None:
            return "memory devices update its parameters"
        if self._rows is not None:
            return "it has tables, of which only rows travel"
        return less_accurate_by_nccl(self.specs)

    def open_meeting(self) -> None:
        """Makes `meeting`; every worker calls it alike, before it works on anything else."""
        self._meeting = self._client.open_meeting(self.name, max(len(self.specs), 8))

    @property
    def meeting(self) -> Meeting:
        """Where the workers come together over this group.

        Raises:
            ValueError: Before open_meeting().
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
        if self._gpu is not None:
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
            self._slots = self._kept = self._rows = self._reached = None
            if self._meeting is not None:
                self._meeting.close()
            self._client.release(self.id)

    def close_gpu_transfers(self) -> None:
        """Ends what is under way: waits for a step that this worker has ended, gives up any other. Idempotent."""
        if self._gpu is None:
            return
        if self._is_joined:
            # The GPU may be behind, and other workers need what it has still to bring.
            reason = self._end_last_step(self._gpu)
            if reason:
                logger.error(
                    "[w%d] %s: the last step did not come to its end (%s); what is on the GPU is that of no step",
                    self._client.rank,
                    self.name,
                    reason,
                )
        self._is_joined = False
        self._gpu.close()

    def _end_last_step(self, gpu: _native.GpuTransfers) -> str:
        """Waits until this worker is needed no more; returns what has gone wrong, "" if nothing has."""
        try:
            status = gpu.status()
            if status == _native.WaitStatus.DONE:
                status = self._native.pull_all(self.id, self._client.timeout_s)
            if status == _native.WaitStatus.DONE and self._nccl is not None:
                self._nccl.settle()
                self._nccl.leave()
        except (_native.NcclError, CoarseError) as error:
            return str(error)
        return "" if status in (_native.WaitStatus.DONE, _native.WaitStatus.FORKED) else status.name

    def _memory_kept(self) -> OptimizerMemory:
        if self._slots is None:
            raise self._closed_error()
        if self._kept is None:
            raise ValueError(f"{self.name} was registered without an optimizer")
        return self._kept

    def _describe_pending(self) -> str:
        waits = [self._describe_wait(i) for i in range(len(self.specs)) if self._native.is_late(self.id, i)]
        if not waits:
            return f"tensors of {self.name}, which the workers reduce themselves by NCCL"
        return "; ".join(waits[:3]) + (f"; and {len(waits) - 3} more tensors" if len(waits) > 3 else "")

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

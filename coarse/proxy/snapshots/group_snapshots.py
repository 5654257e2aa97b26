"""Snapshots of one tensor group's parameters and optimizer states, read by the home device."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coarse.errors import ProtocolError, SnapshotLostError
from coarse.kernels import _native
from coarse.proxy.memory import DeviceMemory
from coarse.wire.failure_messages import overwritten_counter
from coarse.wire.registration import (
    PARAMETERS,
    SNAPSHOT_CONTROL,
    SNAPSHOT_POOL,
    SNAPSHOT_REQUEST,
    STATES,
    GroupSchema,
    fd_of,
    region_of,
)
from coarse.wire.segments import Segment


def allocate_snapshots(memory: DeviceMemory, name: str, plan: _native.GroupPlan) -> dict[str, Segment]:
    """The segments through which snapshots of a group are begun and kept; the pool uses no memory yet."""
    segments = {
        SNAPSHOT_REQUEST: memory.allocate_host(f"snapshot request of {name}", _native.SNAPSHOT_REQUEST_BYTES),
        SNAPSHOT_CONTROL: memory.allocate_host(
            f"snapshot control of {name}", _native.snapshot_control_bytes(plan)
        ),
    }
    if memory.is_mappable:
        pool_bytes = _native.snapshot_pool_bytes(plan)
        segments[SNAPSHOT_POOL] = memory.allocate_sparse(f"snapshot pool of {name}", pool_bytes)
    return segments


def choose_pool_limit(pool_bytes: int, whole_bytes: int, available_bytes: int) -> int:
    """Memory limit of old versions in bytes.

    Args:
        pool_bytes: As in Settings; 0 to choose automatically.
        whole_bytes: Size of one snapshot.
        available_bytes: Available device memory.
    """
    return pool_bytes or min(whole_bytes, available_bytes // 2)


def warm(snapshots: _native.GroupSnapshots, first: int, should_stop: Callable[[], bool]) -> None:
    """Allocates the memory of one whole snapshot in advance, permanently: the update after a snapshot only copies.

    Does nothing if the limit is lower or memory runs out: memory is then allocated as versions are kept. Call it in
    each memory device, because each maps the memory into its own process.

    Args:
        snapshots: Snapshots of the device's proxy.
        first: The first shard to process: devices with different first shards share the clearing of pages.
        should_stop: Called from time to time; True stops.
    """
    for array in range(snapshots.num_arrays):
        for shard in range(snapshots.num_shards):
            if should_stop() or not snapshots.warm((first + shard) % snapshots.num_shards, array):
                return


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class GroupSnapshots:
    """Reads the versions to which a group's snapshots refer, while memory devices update the group.

    Array 0 of a tensor is its parameter; the others are its optimizer states, in the order of the native rule.
    Threads: one at a time for each snapshot.

    Args:
        schema, plan: Schema and plan of the group.
        shared: The group's segments by name; the caller closes them.
        memory: Memory that reaches its tensors; None for host memory.
        versions: The pool of old versions; None if it is the group's SNAPSHOT_POOL.
        ranks: The ranks of the workers that begin snapshots, by client number.
    """

    def __init__(
        self,
        schema: GroupSchema,
        plan: _native.GroupPlan,
        shared: Mapping[str, Segment],
        memory: _native.TensorMemory | None = None,
        versions: _native.SnapshotPool | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        self.name = schema.name
        self._ranks = ranks
        self._num_lost = 0
        self._has_overwritten_counter = False
        self._num_tensors = len(schema.specs)
        self._tensor_of_shard = [shard.tensor for shard in schema.partition().shards]
        self._native = _native.SnapshotReader(
            plan,
            region_of(shared, PARAMETERS),
            region_of(shared, STATES),
            fd_of(shared, SNAPSHOT_REQUEST),
            fd_of(shared, SNAPSHOT_CONTROL),
            fd_of(shared, SNAPSHOT_POOL),
            memory=memory,
            versions=versions,
        )
        self.num_arrays = self._native.num_arrays

    def set_limit(self, num_bytes: int) -> None:
        """Sets the memory limit of old versions. Call it before the first snapshot."""
        self._native.set_limit(num_bytes)

    def num_bytes(self, tensor: int, array: int) -> int:
        """Length of an array of a tensor.

        Raises:
            ProtocolError: If the array does not exist.
        """
        found = sum(self._native.block_bytes(shard, array) for shard in self._shards(tensor, array))
        if found == 0:
            raise ProtocolError(f"{self.name} has no array {array} of tensor {tensor}, only of others")
        return found

    def read(
        self,
        snapshot: int,
        tensor: int,
        array: int,
        *,
        lets_go: bool,
        reserve: Callable[[int], memoryview[Any]],
    ) -> Iterator[memoryview[Any]]:
        """An array at the start of the snapshot, in pieces; each is valid until the next one is requested.

        Args:
            snapshot, tensor, array: Numbers of snapshot, tensor and array.
            lets_go: Whether to free each piece after reading.
            reserve: Takes the length of a piece and returns its memory.

        Raises:
            SnapshotLostError: If the snapshot was dropped or never begun, or has freed the array.
            ProtocolError: If the array does not exist.
        """
        for shard in self._shards(tensor, array):
            buffer = reserve(self._native.block_bytes(shard, array))
            if not self._native.read(snapshot, shard, array, buffer):
                raise SnapshotLostError(self._why_lost(snapshot))
            if lets_go:
                self._native.let_go(snapshot, shard, array)
            yield buffer

    def release(self, snapshot: int) -> None:
        """Releases a snapshot. Idempotent."""
        self._native.release(snapshot)

    def keep_all(self) -> None:
        """Copies all data to which a snapshot refers; afterwards a worker may write to it in place."""
        self._native.keep_all()

    def statistics(self) -> _native.SnapshotStatistics:
        """Contents and cost of the pool."""
        return self._native.statistics()

    def incidents(self) -> Iterator[str]:
        """Errors since the last call, and their causes."""
        found = self.statistics()
        if found.num_lost > self._num_lost:
            self._num_lost = found.num_lost
            yield (
                f"{self.name}: a snapshot of {self._describe_holder(found.lost_of)} was given up, after an update "
                f"had waited for room in the pool of {found.limit_bytes / 2**20:.1f} MiB"
            )
        if found.impossible and not self._has_overwritten_counter:
            self._has_overwritten_counter = True
            yield overwritten_counter(self.name, found.impossible, self._ranks)

    def _describe_holder(self, client_and_one: int) -> str:
        """The worker that held a snapshot, as that worker has recorded it."""
        if 1 <= client_and_one <= len(self._ranks):
            return f"worker {self._ranks[client_and_one - 1]}"
        return f"none of workers {_listed(self._ranks)}, by their own word,"

    def _shards(self, tensor: int, array: int) -> range:
        if not 0 <= tensor < self._num_tensors or not 0 <= array < self.num_arrays:
            raise ProtocolError(f"{self.name} has no array {array} of a tensor {tensor}")
        shards = self._tensor_of_shard
        return range(bisect_left(shards, tensor), bisect_right(shards, tensor))

    def _why_lost(self, snapshot: int) -> str:
        if not self._native.is_lost(snapshot):
            return f"{self.name}: snapshot {snapshot} was released, or never begun"
        limit = self.statistics().limit_bytes
        return (
            f"{self.name}: snapshot {snapshot} was given up, because its pool of {limit / 2**20:.1f} MiB was full "
            "and nothing was freed for 5 s. Raise COARSE_SNAPSHOT_POOL_BYTES, or read snapshots sooner."
        )

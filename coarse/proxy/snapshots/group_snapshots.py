"""The snapshots of one tensor group's parameters and optimizer state, as its home device reads them."""

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
    """The segments through which snapshots of a group are begun and kept; the pool takes no memory yet."""
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
    """How much memory old versions may take.

    Args:
        pool_bytes: As in Settings; 0 to choose.
        whole_bytes: Of one snapshot.
        available_bytes: What device memory can still give.
    """
    return pool_bytes or min(whole_bytes, available_bytes // 2)


def warm(snapshots: _native.GroupSnapshots, first: int, should_stop: Callable[[], bool]) -> None:
    """Takes the memory of one whole snapshot ahead, and for good: the update after a snapshot then only copies.

    Does nothing where the limit is below that, or memory runs out: it is then taken as versions are kept. To be
    called in each memory device, for each maps the memory into itself.

    Args:
        snapshots: Of the device's proxy.
        first: The shard to begin with: devices that begin apart share the clearing of pages.
        should_stop: Asked now and then.
    """
    for array in range(snapshots.num_arrays):
        for shard in range(snapshots.num_shards):
            if should_stop() or not snapshots.warm((first + shard) % snapshots.num_shards, array):
                return


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class GroupSnapshots:
    """Reads the versions to which snapshots of a group refer, while memory devices update it.

    Array 0 of a tensor is its parameter, the others are what the optimizer keeps beside it, in the order of its
    native rule. Threads: one at a time for each snapshot.

    Args:
        schema, plan: Of the group.
        shared: Its segments by name; stay the caller's.
        memory: What reaches its tensors; None for the host's memory.
        versions: Where old versions lie; None where that is the group's SNAPSHOT_POOL.
        ranks: The workers that begin snapshots, by client number.
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
        """How much memory old versions may take. Before the first snapshot."""
        self._native.set_limit(num_bytes)

    def num_bytes(self, tensor: int, array: int) -> int:
        """Length of an array of a tensor.

        Raises:
            ProtocolError: If there is none.
        """
        found = sum(self._native.block_bytes(shard, array) for shard in self._shards(tensor, array))
        if found == 0:
            raise ProtocolError(f"{self.name} has no array {array} of tensor {tensor}, only of others")
        return found

    def read(self, snapshot: int, tensor: int, array: int, *, lets_go: bool) -> Iterator[memoryview[Any]]:
        """An array as it was when the snapshot began, in pieces that are valid until the next one is asked for.

        Args:
            snapshot, tensor, array: Which.
            lets_go: Whether the snapshot needs each piece no more once it was read, so that its memory is free.

        Raises:
            SnapshotLostError: If the snapshot was given up, or never begun, or has let go of it.
            ProtocolError: If there is no such array.
        """
        shards = self._shards(tensor, array)
        buffer = memoryview(bytearray(max(self._native.block_bytes(shard, array) for shard in shards)))
        for shard in shards:
            if not self._native.read(snapshot, shard, array, buffer):
                raise SnapshotLostError(self._why_lost(snapshot))
            if lets_go:
                self._native.let_go(snapshot, shard, array)
            yield buffer[: self._native.block_bytes(shard, array)]

    def release(self, snapshot: int) -> None:
        """Nobody needs the snapshot any more. Idempotent."""
        self._native.release(snapshot)

    def keep_all(self) -> None:
        """Copies everything to which a snapshot refers: from then on a worker may write to it where it lies."""
        self._native.keep_all()

    def statistics(self) -> _native.SnapshotStatistics:
        """What the pool holds, and has cost."""
        return self._native.statistics()

    def incidents(self) -> Iterator[str]:
        """What has gone wrong since the last call, and by whose doing."""
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
        """Whose a snapshot was, by that worker's own word."""
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

"""Direct all-reduce in the workers' shared memory (COARSE paper, section III-F; docs/design/planning.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from coarse.client.memory.tensor_bytes import TensorBytes
from coarse.kernels import _native


class _BarrierGroup(Protocol):
    def buffer(self, index: int) -> TensorBytes:
        """The writable bytes of a tensor's slot."""

    def push(self, index: int) -> None:
        """Hands a tensor to the memory devices."""

    def flush(self) -> None:
        """Wakes the memory devices."""

    def pull(self, index: int) -> int:
        """Waits for the result of a tensor."""

    def close(self) -> None:
        """Releases the group."""


class NodeBarrier:
    """A barrier of all workers of a node for one tensor group; independent of the order of other groups' work.

    Client.open_node_barrier() creates it.

    Args:
        group: Two tensors: one byte, and the numbers to compare at once.
    """

    def __init__(self, group: _BarrierGroup) -> None:
        self._group = group
        numbers = group.buffer(1)
        assert isinstance(numbers, memoryview)
        self._numbers = numbers.cast("d")
        self._has_told = False

    def wait(self) -> None:
        """Returns when every worker has called it the same number of times.

        Raises:
            WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As while waiting for a tensor.
        """
        self._group.push(0)
        self._group.pull(0)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest value of each number over all workers; every worker calls it.

        Numbers are at least 0; all workers pass the same count.

        Raises:
            WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As while waiting for a tensor.
        """
        self.tell(numbers)
        return self.told()[: len(numbers)]

    def tell(self, numbers: Sequence[float]) -> None:
        """Like largest(), without the result: waits only for the result of the previous call."""
        if self._has_told:
            self.told()
        for index in range(len(self._numbers)):
            self._numbers[index] = numbers[index] if index < len(numbers) else 0.0
        self._group.push(1)
        self._group.flush()
        self._has_told = True

    def told(self) -> list[float]:
        """The result of the last tell()."""
        if self._has_told:
            self._group.pull(1)
            self._has_told = False
        return list(self._numbers)

    def close(self) -> None:
        """Releases the barrier's memory. Idempotent."""
        self._group.close()


class HostDirectAllReduce:
    """Reduces tensors on the workers' processors: each worker reduces a piece of all slots, then all copy the pieces.

    The arithmetic and the order of workers match those of the memory devices, so that results have the same bits.

    Args:
        native: This worker's native client.
        group: Number of the tensor group. Workers see each other's slots of it.
        num_workers: Number of workers of the node.
        barrier: For this tensor group alone, because groups may end their steps in any order.
    """

    def __init__(self, native: _native.Client, group: int, num_workers: int, barrier: NodeBarrier) -> None:
        self._native = native
        self._group = group
        self._num_workers = num_workers
        self._barrier = barrier

    def reduce(self, shards: Mapping[int, int], contributors: Sequence[int]) -> None:
        """Reduces those of `shards` to which every worker has contributed; memory devices have reduced the others.

        Every worker calls it with the same arguments, after pulling all contributions and before writing to a slot
        again.

        Args:
            shards: The tensor of each shard that was pushed for direct all-reduce.
            contributors: How many workers contributed to each tensor of the group.

        Raises:
            WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As while waiting for a tensor.
        """
        own = [shard for shard, tensor in shards.items() if contributors[tensor] == self._num_workers]
        if not own:
            return
        self._native.reduce_pieces(self._group, own)
        self._barrier.wait()
        self._native.copy_pieces(self._group, own)
        self._barrier.wait()

"""The workers' own path in the memory that they share (COARSE paper, section III-F; docs/design/planning.md)."""

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
        """Gives the group up."""


class NodeBarrier:
    """Where all workers of a node come together over one tensor group, in whichever order groups are worked on.

    Made by Client.open_node_barrier().

    Args:
        group: Two tensors: a byte, and as many numbers as are compared at once.
    """

    def __init__(self, group: _BarrierGroup) -> None:
        self._group = group
        numbers = group.buffer(1)
        assert isinstance(numbers, memoryview)
        self._numbers = numbers.cast("d")
        self._has_told = False

    def wait(self) -> None:
        """Returns when every worker has called it as often.

        Raises:
            WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As while waiting for a tensor.
        """
        self._group.push(0)
        self._group.pull(0)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Of each number, all at least 0, that of the worker for which it is largest; every worker calls it alike.

        Raises:
            WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As while waiting for a tensor.
        """
        self.tell(numbers)
        return self.told()[: len(numbers)]

    def tell(self, numbers: Sequence[float]) -> None:
        """As largest(), for a worker that need not know the answer: waits for that of the call before alone."""
        if self._has_told:
            self.told()
        for index in range(len(self._numbers)):
            self._numbers[index] = numbers[index] if index < len(numbers) else 0.0
        self._group.push(1)
        self._group.flush()
        self._has_told = True

    def told(self) -> list[float]:
        """The answer to what was told last."""
        if self._has_told:
            self._group.pull(1)
            self._has_told = False
        return list(self._numbers)

    def close(self) -> None:
        """Gives its memory up. Idempotent."""
        self._group.close()


class HostDirectAllReduce:
    """Reduces tensors on the workers' own processors: each worker a piece, in all slots, then everyone takes them.

    The arithmetic and the order of workers are those of the memory devices, so that results have the same bits.

    Args:
        native: Of this worker.
        group: Number of the tensor group, of which workers see each other's slots.
        num_workers: Of the node.
        meeting: Of this tensor group alone, since groups may end their steps in any order.
    """

    def __init__(self, native: _native.Client, group: int, num_workers: int, meeting: NodeBarrier) -> None:
        self._native = native
        self._group = group
        self._num_workers = num_workers
        self._meeting = meeting

    def reduce(self, shards: Mapping[int, int], contributors: Sequence[int]) -> None:
        """Reduces those of `shards` that every worker has contributed to; memory devices have reduced the others.

        Every worker calls it alike, after all contributions have been pulled and before it writes to a slot again.

        Args:
            shards: That were pushed for this path, with the tensor of each.
            contributors: How many workers contributed to each tensor of the group.

        Raises:
            WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As while waiting for a tensor.
        """
        own = [shard for shard, tensor in shards.items() if contributors[tensor] == self._num_workers]
        if not own:
            return
        self._native.reduce_pieces(self._group, own)
        self._meeting.wait()
        self._native.copy_pieces(self._group, own)
        self._meeting.wait()

"""A worker's private view of shared parameters: only this worker sees its writes."""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coarse.client.direct_allreduce import NodeBarrier
from coarse.kernels import _native

_ABOVE_ALL_DIGESTS = 1 << 33


class PrivateWrites:
    """The parameters of a tensor group; pages that this worker writes stay private until take_over().

    TensorGroup.open_own_parameters() creates it. One caller at a time.

    Args:
        view: Private view of the shared memory.
        shared: The same memory, as all workers see it.
        offsets, lengths: Place of each tensor's parameter in the memory, in bytes.
        barrier: Barrier of all workers, for take_over() alone.
        publishes: Whether this worker writes the common values to the shared memory; one worker of each node does.
    """

    def __init__(
        self,
        view: _native.PrivateView,
        shared: memoryview[Any],
        offsets: Sequence[int],
        lengths: Sequence[int],
        barrier: NodeBarrier,
        *,
        publishes: bool,
    ) -> None:
        self._view = view
        self._bytes: memoryview[Any] = memoryview(view)  # type: ignore[arg-type,unused-ignore]
        self._shared = shared
        self._offsets = offsets
        self._lengths = lengths
        self._barrier = barrier
        self._publishes = publishes

    def parameter(self, tensor: int) -> memoryview[Any]:
        """The writable bytes of a tensor's parameter; mapped as long as a view of them lives."""
        start = self._offsets[tensor]
        return self._bytes[start : start + self._lengths[tensor]]

    def take_over(self, before_writing: Callable[[], object]) -> tuple[npt.NDArray[np.uint32], bool]:
        """Copies the workers' private writes to the shared parameters, if all workers wrote the same. Collective.

        Call it between two updates. Waits for others only if this worker has written; a value that is equal to the
        shared value again counts as not written.

        Args:
            before_writing: Called before shared parameters change, by the worker that writes for its node.

        Returns:
            A digest of this worker's writes to each parameter, 0 for none; and whether all workers wrote the same. If
            not, the shared parameters are unchanged, and this worker's writes stay private.

        Raises:
            WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As while waiting for a tensor.
        """
        written = self._written()
        digests = np.zeros(len(self._offsets), dtype=np.uint32)
        for tensor in written:
            digests[tensor] = zlib.crc32(self.parameter(tensor)) or 1
        mine = float(zlib.crc32(digests.tobytes()) + 1) if written else 0.0
        numbers = [mine, _ABOVE_ALL_DIGESTS - mine]
        self._barrier.tell(numbers)
        if not written:
            return digests, True
        if self._barrier.told()[: len(numbers)] != numbers:
            return digests, False
        if self._publishes:
            before_writing()
            for tensor in written:
                start = self._offsets[tensor]
                self._shared[start : start + self._lengths[tensor]] = self.parameter(tensor)
        self._barrier.wait()
        self._view.give_back()
        return digests, True

    def first_written(self) -> int | None:
        """The first tensor in a page that this worker has written since take_over(); None if it wrote none."""
        written = self._view.written()
        return bisect_right(self._offsets, written[0][0]) - 1 if written else None

    def give_back(self) -> None:
        """Discards this worker's writes: it sees the shared parameters again."""
        self._view.give_back()

    def _written(self) -> list[int]:
        """Tensors that differ from the shared ones; if none differs, discards the written pages."""
        if not self._view.written():
            return []
        tensors: set[int] = set()
        for offset, num_bytes in self._view.changed(self._shared):
            first = bisect_right(self._offsets, offset) - 1
            tensors.update(range(first, bisect_left(self._offsets, offset + num_bytes)))
        if not tensors:
            self._view.give_back()
        return sorted(tensors)

    def close(self) -> None:
        """Leaves the barrier; mapped memory stays as long as a view lives. Idempotent."""
        self._barrier.close()

"""Pushes tensors from GPU memory and copies results back to it (docs/design/gpu-workers.md)."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from coarse.errors import CoarseError, NcclFailedError
from coarse.kernels import _native

logger = logging.getLogger(__name__)

GpuTensor = tuple[int, int, int, int, int]
"""A tensor in GPU memory: its number; flags of the contribution; the address from which it is copied to its slot (0
for no copy); the address to which its result is copied (0 for no copy); and TensorGroup.updated_parameter() if the
parameter is the result (0 if the slot is)."""


MappedMemory = tuple[int, int, _native.CudaContext | None]
"""Address and bytes of memory, and the GPU for which it is mapped: the GPU of the transfers, another GPU if that one
does not reach the memory, or None for the host. Zeros if nothing is copied."""

NOTHING: MappedMemory = (0, 0, None)


class _DirectPath(Protocol):
    def leave(self) -> None:
        """Ends direct all-reduce."""


class _TransferredGroup(Protocol):
    @property
    def id(self) -> int:
        """Number of the group."""

    @property
    def name(self) -> str:
        """Name for error messages."""

    @property
    def rank(self) -> int:
        """This worker's rank."""

    @property
    def nccl(self) -> _DirectPath:
        """Direct all-reduce between the workers."""

    def check(self, status: _native.WaitStatus, *, timeout_s: float) -> None:
        """Raises an error unless `status` is a success."""

    def check_open(self) -> None:
        """Raises SessionClosedError if the group is closed."""

    def tell_pushed(self, tensors: Sequence[GpuTensor]) -> None:
        """Notes which tensors were pushed."""


class GpuTransfers:
    """Pushes tensors of one group as streams of a GPU compute them, and makes streams wait for results.

    TensorGroup.open_gpu_transfers() creates it. Each step ends with join(). TensorGroup.pull_all() waits for results
    of memory devices, not for work of GPUs. Calls raise errors that occurred since the previous call:
    MemoryDeviceLostError, WorkerLostError, SyncTimeoutError, and NcclFailedError if NCCL fails during direct
    all-reduce.

    Args:
        group: The group of the tensors.
        client: This worker's native client.
        context: Context of the GPU.
        slots: This worker's slots.
        results: Parameters that are returned instead of slots.
        timeout_s: Longest wait for results in seconds.

    Raises:
        CudaError: If memory cannot be pinned, or streams of the GPU cannot wait for the host's memory.
    """

    def __init__(
        self,
        group: _TransferredGroup,
        client: _native.Client,
        context: _native.CudaContext,
        slots: MappedMemory,
        results: MappedMemory,
        timeout_s: float,
    ) -> None:
        self.context = context
        self.stream = 0
        """Handle of the stream that computes pushed tensors: the stream of the last push or join."""
        self._group: _TransferredGroup = weakref.proxy(group)  # weak, because it owns this object
        self._client = client
        self._timeout_s = timeout_s
        self._native = _native.GpuTransfers(client, group.id, context, slots, results, timeout_s)
        self._is_joined = False  # since the last push

    def stage(self, tensors: Sequence[GpuTensor], stream: int) -> None:
        """Copies tensors to their slots as `stream` computes them, before later pushes are announced.

        Arguments and errors are those of push().
        """
        self._is_joined = False
        self._check(lambda: self._native.stage(tensors, stream))

    def push(self, tensors: Sequence[GpuTensor], stream: int) -> None:
        """Contributes tensors as `stream` computes them, and copies results back; returns at once.

        Args:
            tensors: Their memory must not change until a stream has joined.
            stream: Handle of the stream that computes them.

        Raises:
            CudaError: If the stream is being captured into a CUDA graph.
        """
        self._is_joined = False
        self._check(lambda: self._native.push(tensors, stream))
        self.stream = stream
        self._group.tell_pushed(tensors)

    def join(self, stream: int) -> None:
        """Makes later work on `stream` wait for the results of all pushed tensors."""
        self.stream = stream
        self._check(lambda: self._native.join(stream))
        self._is_joined = True

    def check(self) -> None:
        """Raises any error that occurred since the last call."""
        self._check(self._native.status)

    @property
    def batch_bytes(self) -> int:
        """The best size of the next push: it shrinks towards the end of a step, which is join()."""
        return self._native.batch_bytes

    @property
    def num_pushed(self) -> int:
        """Number of pushes so far, for has_left()."""
        return self._native.num_pushed

    def has_left(self, num_pushed: int) -> bool:
        """Whether the first `num_pushed` pushes have reached their slots, so that their memory may change."""
        return self._native.has_brought(num_pushed)

    def use_direct_allreduce(self, path: _native.GpuDirectAllReduce | None, slots: int) -> None:
        """Reduces some shards by NCCL from the next push on.

        Args:
            path: The shards; None for none.
            slots: Address of the slots on the GPU if tensors lie there, else 0.
        """
        self._native.use_direct_allreduce(path, slots)

    def wait_for_direct_allreduce(self) -> None:
        """Waits until NCCL has completed its work."""
        self._check(self._native.wait_for_direct_allreduce)

    def close(self) -> None:
        """Ends transfers: waits for a step that this worker has ended, cancels any other. Idempotent."""
        if self._is_joined:
            # The GPU may be late, and other workers need its remaining transfers.
            reason = self._end_last_step()
            if reason:
                logger.error(
                    "[w%d] %s: the last step did not come to its end (%s); what is on the GPU is that of no step",
                    self._group.rank,
                    self._group.name,
                    reason,
                )
        self._is_joined = False
        self._native.close()

    def _end_last_step(self) -> str:
        """Waits until other workers no longer need this one; returns the error, "" for none."""
        try:
            status = self._native.status()
            if status == _native.WaitStatus.DONE:
                status = self._client.pull_all(self._group.id, self._timeout_s)
            if status == _native.WaitStatus.DONE:
                self._group.nccl.leave()
        except (_native.NcclError, CoarseError) as error:
            return str(error)
        return "" if status in (_native.WaitStatus.DONE, _native.WaitStatus.FORKED) else status.name

    def _check(self, call: Callable[[], _native.WaitStatus]) -> None:
        self._group.check_open()
        try:
            status = call()
        except _native.NcclError as error:
            raise NcclFailedError(f"worker {self._group.rank}: {self._group.name}: {error}") from error
        self._group.check(status, timeout_s=self._timeout_s)

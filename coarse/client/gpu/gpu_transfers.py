"""Tensors in the memory of a GPU, as a worker pushes them from there and gets results back
(docs/design/gpu-workers.md).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from coarse.errors import CoarseError, NcclFailedError
from coarse.kernels import _native

logger = logging.getLogger(__name__)

GpuTensor = tuple[int, int, int, int, int]
"""A tensor in the memory of a GPU: its number, flags of the contribution, the address from which it is copied to its
slot (0 for none), that to which its result is copied (0 for none), and TensorGroup.updated_parameter() if that is the
result (0 for the slot)."""


MappedMemory = tuple[int, int, _native.CudaContext | None]
"""Address and bytes of memory, and the GPU for which it is mapped: that of the transfers, another one where that does
not reach it, or None for the host. Zeros where nothing is copied."""

NOTHING: MappedMemory = (0, 0, None)


class _DirectPath(Protocol):
    def leave(self) -> None:
        """The workers reduce nothing themselves any more."""


class _TransferredGroup(Protocol):
    @property
    def id(self) -> int:
        """Its number."""

    @property
    def name(self) -> str:
        """For errors."""

    @property
    def rank(self) -> int:
        """Of this worker."""

    @property
    def nccl(self) -> _DirectPath:
        """By which workers reduce some tensors themselves."""

    def check(self, status: _native.WaitStatus, *, timeout_s: float) -> None:
        """Raises an error unless `status` is a good end."""

    def check_open(self) -> None:
        """Raises SessionClosedError if the group is closed."""

    def tell_pushed(self, tensors: Sequence[GpuTensor]) -> None:
        """Notes which tensors were pushed."""


class GpuTransfers:
    """Pushes tensors of one group as streams of a GPU compute them, and has streams wait for results.

    Made by TensorGroup.open_gpu_transfers(). Each step ends by join(); TensorGroup.pull_all() waits for results of
    memory devices, not for what GPUs do. Calls raise what has happened since the one before:
    MemoryDeviceLostError, WorkerLostError, SyncTimeoutError, and NcclFailedError if NCCL has failed, by which workers
    reduce some tensors themselves.

    Args:
        group: Of the tensors.
        client: Of this worker.
        context: Of the GPU.
        slots: This worker's.
        results: Parameters that come back in place of slots.
        timeout_s: How long results may take.

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
        """Handle of the one that computes what is pushed: that of the last push or join."""
        self._group: _TransferredGroup = weakref.proxy(group)  # which has this one
        self._client = client
        self._timeout_s = timeout_s
        self._native = _native.GpuTransfers(client, group.id, context, slots, results, timeout_s)
        self._is_joined = False  # since the last push

    def bring(self, tensors: Sequence[GpuTensor], stream: int) -> None:
        """Copies tensors to their slots as `stream` computes them, before what is pushed later is announced.

        Arguments and errors are those of push().
        """
        self._is_joined = False
        self._check(lambda: self._native.bring(tensors, stream))

    def push(self, tensors: Sequence[GpuTensor], stream: int) -> None:
        """Contributes tensors as `stream` computes them, and has results copied back; returns at once.

        Args:
            tensors: Their memory stays as it is until a stream has joined.
            stream: Handle of the stream that was given what computes them.

        Raises:
            CudaError: If the stream is being captured into a CUDA graph.
        """
        self._is_joined = False
        self._check(lambda: self._native.push(tensors, stream))
        self.stream = stream
        self._group.tell_pushed(tensors)

    def join(self, stream: int) -> None:
        """Has what `stream` is given from now on wait for all results of what was pushed."""
        self.stream = stream
        self._check(lambda: self._native.join(stream))
        self._is_joined = True

    def check(self) -> None:
        """Raises what has happened since the last call."""
        self._check(self._native.status)

    @property
    def batch_bytes(self) -> int:
        """How much is best pushed next at once: less as a step goes to its end, which is join()."""
        return self._native.batch_bytes

    @property
    def num_pushed(self) -> int:
        """Counts what was pushed, for has_left()."""
        return self._native.num_pushed

    def has_left(self, num_pushed: int) -> bool:
        """Whether everything that was pushed by then is in its slot, so that its memory may change."""
        return self._native.has_brought(num_pushed)

    def use_own_path(self, path: _native.GpuOwnPath | None, slots: int) -> None:
        """Has NCCL reduce some shards from the next push on.

        Args:
            path: Which ones; None for none.
            slots: Where the GPU sees the slots, if tensors lie there; else 0.
        """
        self._native.use_own_path(path, slots)

    def wait_for_own_path(self) -> None:
        """Waits until NCCL has done what it was given."""
        self._check(self._native.wait_for_own_path)

    def close(self) -> None:
        """Ends what is under way: waits for a step that this worker has ended, gives up any other. Idempotent."""
        if self._is_joined:
            # The GPU may be behind, and other workers need what it has still to bring.
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
        """Waits until this worker is needed no more; returns what has gone wrong, "" if nothing has."""
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

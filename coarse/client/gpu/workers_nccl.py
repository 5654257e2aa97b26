"""Joins the workers of a node, each with its GPU, in an NCCL communicator (COARSE paper, section III-F)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from coarse.client.memory.tensor_bytes import gpu_context
from coarse.env import may_share_gpus_over_nccl
from coarse.kernels import _native
from coarse.kernels.nccl import find_nccl
from coarse.wire.registration import DTYPE_NUMBERS, OP_NUMBERS

Gather = Callable[[bytes], list[bytes]]
"""Gathers one value from each worker of the node, by client number; every worker calls it."""

_MOST_SECONDS = 60.0
_LOOK_S = 0.1
_PATIENCE_S = 1.0
_TRIED_BYTES = (4, 64 << 10, 8 << 20)  # NCCL uses other protocols, connections and buffers for each


def join_workers(
    gather: Gather, *, number: int, gpu: str, timeout_s: float, check_others: Callable[[], None]
) -> _native.NcclCommunicator:
    """Joins with all workers of the node; every worker calls it, and it fails on all or on none.

    Args:
        gather: Gathers values from all workers.
        number: This worker's client number.
        gpu: UUID of the GPU that holds this worker's tensors.
        timeout_s: Longest wait for other workers in seconds.
        check_others: Raises if a worker or a memory device was lost.

    Raises:
        NcclError: If NCCL is missing on a worker, refuses or fails; if two workers use one GPU; or if a worker does
            not join.
        WorkerLostError, MemoryDeviceLostError: As for `check_others`.
    """
    gpus = [each.decode() for each in gather(gpu.encode())]
    _fail_together(gather, "" if may_share_gpus_over_nccl() else _describe_sharing(gpus, number))
    name, reason = b"", ""
    try:
        library = find_nccl()
        name = library.unique_id() if number == 0 else b""
    except _native.NcclError as error:
        reason = str(error)
    _fail_together(gather, reason)
    joining = _Joining(library, gather(name)[0], number, gpus)
    try:
        # A worker that fails at once waits below for the others, up to the session's timeout.
        _fail_together(gather, joining.wait(min(_MOST_SECONDS, timeout_s / 2), check_others))
    except BaseException:
        joining.give_up()
        raise
    assert joining.communicator is not None
    return joining.communicator


def _fail_together(gather: Gather, reason: str) -> None:
    """Raises NcclError on all workers if one has a reason."""
    reasons = [each.decode() for each in gather(reason.encode())]
    if failed := [f"worker {number}: {each}" for number, each in enumerate(reasons) if each]:
        raise _native.NcclError("; ".join(failed))


def _describe_sharing(gpus: Sequence[str], number: int) -> str:
    """The other worker that uses this worker's GPU, in words; "" for none."""
    others = [str(other) for other, gpu in enumerate(gpus) if gpu == gpus[number] and other != number]
    if not others:
        return ""
    return f"is on one GPU with worker {', '.join(others)}, which NCCL allows from 2.30 on, if configured"


class _Joining:
    """Joins in its own thread: only the end of the process ends NCCL's wait for missing ranks."""

    def __init__(
        self, library: _native.NcclLibrary, unique_id: bytes, number: int, gpus: Sequence[str]
    ) -> None:
        self._library = library
        self._unique_id = unique_id
        self._number = number
        self._gpus = gpus
        self._reason = ""
        self._is_given_up = False
        self._has_ended = threading.Event()
        self.communicator: _native.NcclCommunicator | None = None
        threading.Thread(target=self._join, name="coarse-nccl", daemon=True).start()

    def wait(self, timeout_s: float, check_others: Callable[[], None]) -> str:
        """Waits for the end; returns the error, "" for none."""
        deadline_s = time.monotonic() + timeout_s
        while not self._has_ended.wait(_LOOK_S):
            check_others()
            if time.monotonic() > deadline_s:
                return f"NCCL has not joined all workers within {timeout_s:.0f} s; set NCCL_DEBUG=INFO for its log"
        return self._reason

    def give_up(self) -> None:
        """Releases the communicator, now or when the thread receives it."""
        self._is_given_up = True
        self._has_ended.wait(_PATIENCE_S)  # an NCCL call may need the communicator until it returns
        if self.communicator is not None:
            self.communicator.abort()

    def _join(self) -> None:
        try:
            context = gpu_context(self._gpus[self._number])
            communicator = _native.NcclCommunicator(
                self._library, self._unique_id, self._number, len(self._gpus), context
            )
            self.communicator = communicator
            if not self._is_given_up:  # otherwise the others are gone, and connecting would block
                _connect(communicator, context)
        except Exception as error:  # passed to the waiting thread
            self._reason = str(error)
        if self._is_given_up and self.communicator is not None:
            self.communicator.abort()
        self._has_ended.set()


def _connect(communicator: _native.NcclCommunicator, context: _native.CudaContext) -> None:
    """Connects the workers by NCCL, which takes time and memory, before any worker waits for a result."""
    numbers, stream = _native.CudaMemory.allocate(context, max(_TRIED_BYTES)), _native.CudaStream(context)
    stream.fill(numbers.address, 0, numbers.num_bytes)
    dtype, op = DTYPE_NUMBERS["float32"], OP_NUMBERS["mean"]
    try:
        for num_bytes in _TRIED_BYTES:
            communicator.all_reduce(
                numbers.address, numbers.address, num_bytes // 4, dtype, op, stream.handle
            )
        stream.synchronize()
        communicator.check()
    except BaseException:
        communicator.abort()
        stream.synchronize()  # before its memory is freed
        raise

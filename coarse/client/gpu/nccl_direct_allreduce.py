"""Direct all-reduce between the workers' GPUs, by NCCL (COARSE paper, section III-F; docs/design/planning.md)."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from coarse.client.direct_allreduce import NodeBarrier
from coarse.kernels import _native
from coarse.schema import TensorSpec

if TYPE_CHECKING:
    from coarse.client.gpu.gpu_transfers import GpuTransfers

_FLAGS = _native.DIRECT_ALLREDUCE | _native.BY_NCCL
_DTYPES = ("float32", "float64")  # NCCL rounds or truncates others at each addition
_ABORTED_AFTER_S = 5.0  # workers that are microseconds behind may still read this one's memory


class _ReducedGroup(Protocol):
    gpu: GpuTransfers | None

    @property
    def id(self) -> int:
        """Number of the group."""

    @property
    def name(self) -> str:
        """Name for error messages."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """The tensors of the group."""

    @property
    def num_shards(self) -> int:
        """Number of shards of a step."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether this worker sees its slots on a GPU."""

    @property
    def address_on_gpu(self) -> int:
        """Address of this worker's slots on its GPU; 0 if the GPU cannot reach them."""

    @property
    def barrier(self) -> NodeBarrier:
        """The node barrier of this group."""

    def needs_memory_devices(self) -> str:
        """Work of the memory devices for this group besides reducing; "" for none."""


class NcclDirectAllReduce:
    """Reduces shards of one group between the workers' GPUs by NCCL.

    NCCL determines the order of additions. While tensors take this way, every worker pushes all of them in each step,
    and ends the step with GpuTransfers.join(). Only one group of a session may use it, because NCCL needs all of its
    work in the same order on all workers.

    Args:
        group: The group of the tensors; use() needs its `barrier`.
        native: This worker's native client.
    """

    def __init__(self, group: _ReducedGroup, native: _native.Client) -> None:
        self._group: _ReducedGroup = weakref.proxy(group)  # weak, because it owns this object
        self._native = native
        self._why_not = ""
        self._communicator: _native.NcclCommunicator | None = None  # set while NCCL reduces shards
        self.is_claimed = False
        """Whether this group, and no other of the session, may use NCCL."""
        self.objection: Callable[[], str] = str
        """Checked before the first reduction by NCCL: returns why it must not start, "" if it may."""

    def cannot_use(self) -> str:
        """Why workers cannot reduce tensors of this group by NCCL; "" if they can."""
        if reason := self._why_not or self.objection():
            return reason
        if self._group.gpu is None:
            return "its tensors are copied by the processor"
        return self._group.needs_memory_devices() or less_accurate_by_nccl(self._group.specs)

    def use(self, communicator: _native.NcclCommunicator, shards: Sequence[int]) -> None:
        """Reduces these shards by NCCL from the next push on; every worker calls it between the same two steps.

        Args:
            communicator: Communicator of the node's workers.
            shards: In the order in which all workers submit them to NCCL; empty to stop using NCCL.

        Raises:
            ValueError: If cannot_use() returns a reason, or the group has no barrier.
        """
        if reason := self.cannot_use():
            raise ValueError(f"{self._group.name}: workers cannot reduce by NCCL: {reason}")
        self._end()
        if not shards:
            return
        own = set(shards)
        self._set_flags([_FLAGS if shard in own else 0 for shard in range(self._group.num_shards)])
        path = _native.GpuDirectAllReduce(communicator, self._native, self._group.id, shards)
        self._transfers.use_direct_allreduce(path, self._group.address_on_gpu if self._group.is_on_gpu else 0)
        self._communicator = communicator

    def stop(self, why: str) -> None:
        """Returns all shards to the memory devices for good; every worker calls it between the same two steps.

        Args:
            why: The reason that cannot_use() returns afterwards.
        """
        self._why_not = why
        self._end()

    def synchronize(self) -> None:
        """Waits until NCCL has completed its work.

        Raises:
            NcclFailedError, WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As for joining a step.
        """
        if self._communicator is not None:
            self._transfers.wait_for_direct_allreduce()

    def leave(self) -> None:
        """Settles, then releases NCCL when the other workers have finished as well; does not wait for them."""
        self.synchronize()
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            timer = threading.Timer(_ABORTED_AFTER_S, communicator.abort)
            timer.daemon = True
            atexit.register(timer.cancel)  # the end of the process releases everything anyway
            with contextlib.suppress(RuntimeError):  # no thread can start while the interpreter ends
                timer.start()

    @property
    def _transfers(self) -> GpuTransfers:
        assert self._group.gpu is not None
        return self._group.gpu

    def _end(self) -> None:
        if self._communicator is None:
            return
        self.synchronize()
        self._group.barrier.wait()  # others may read this worker's memory until they finish
        self._set_flags([0] * self._group.num_shards)
        self._transfers.use_direct_allreduce(None, 0)
        self._communicator = None

    def _set_flags(self, flags: Sequence[int]) -> None:
        self._native.set_direct_allreduce_flags(self._group.id, flags)


def less_accurate_by_nccl(specs: Sequence[TensorSpec]) -> str:
    """The tensors that NCCL would reduce less accurately than memory devices, in words; "" for none."""
    for spec in specs:
        if spec.dtype not in _DTYPES or spec.op == "max":
            return f"NCCL would not have the accuracy of memory devices for the {spec.op} of {spec.dtype}"
    return ""

"""The workers' own path between their GPUs, by NCCL (COARSE paper, section III-F; docs/design/planning.md)."""

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

_FLAGS = _native.OWN_PATH | _native.BY_NCCL
_DTYPES = ("float32", "float64")  # others it rounds or truncates at each addition
_ABORTED_AFTER_S = 5.0  # workers that are microseconds behind may still read this one's memory


class _ReducedGroup(Protocol):
    gpu: GpuTransfers | None

    @property
    def id(self) -> int:
        """Its number."""

    @property
    def name(self) -> str:
        """For errors."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Its tensors."""

    @property
    def num_shards(self) -> int:
        """Of a step."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether this worker sees its slots on a GPU."""

    @property
    def address_on_gpu(self) -> int:
        """Where this worker's GPU reaches its slots; 0 if it does not."""

    @property
    def meeting(self) -> NodeBarrier:
        """Where the workers come together over this group."""

    def needs_memory_devices(self) -> str:
        """What else memory devices are for than reducing; "" for nothing."""


class NcclDirectAllReduce:
    """Has NCCL reduce shards of one group between the workers' GPUs.

    Numbers are added in the order of NCCL. While tensors go this way, every worker pushes all of them in each step,
    and ends it by GpuTransfers.join(). One group of a session has it, since NCCL needs all of its work in one order
    on all workers.

    Args:
        group: Of the tensors; use() needs its `meeting`.
        native: Of this worker.
    """

    def __init__(self, group: _ReducedGroup, native: _native.Client) -> None:
        self._group: _ReducedGroup = weakref.proxy(group)  # which has this one
        self._native = native
        self._why_not = ""
        self._communicator: _native.NcclCommunicator | None = None  # while shards go this way
        self.is_claimed = False
        """Whether NCCL may reduce these tensors, and no others of the session."""
        self.objection: Callable[[], str] = str
        """Asked before anything is reduced this way: why not, "" for no reason."""

    def cannot_use(self) -> str:
        """Why workers cannot reduce tensors of this group by NCCL; "" if they can."""
        if reason := self._why_not or self.objection():
            return reason
        if self._group.gpu is None:
            return "its tensors are copied by the processor"
        return self._group.needs_memory_devices() or less_accurate_by_nccl(self._group.specs)

    def use(self, communicator: _native.NcclCommunicator, shards: Sequence[int]) -> None:
        """Has NCCL reduce these shards from the next push on; every worker calls it alike, between two steps.

        Args:
            communicator: Of the node's workers.
            shards: In the order in which all workers give them to NCCL; none for nothing any more.

        Raises:
            ValueError: If cannot_use() has a reason, or the group has no meeting.
        """
        if reason := self.cannot_use():
            raise ValueError(f"{self._group.name}: workers cannot reduce by NCCL: {reason}")
        self._end()
        if not shards:
            return
        own = set(shards)
        self._set_flags([_FLAGS if shard in own else 0 for shard in range(self._group.num_shards)])
        path = _native.GpuOwnPath(communicator, self._native, self._group.id, shards)
        self._transfers.use_own_path(path, self._group.address_on_gpu if self._group.is_on_gpu else 0)
        self._communicator = communicator

    def stop(self, why: str) -> None:
        """Has memory devices reduce everything, now and later; every worker calls it alike, between two steps.

        Args:
            why: The reason that cannot_use() has from now on.
        """
        self._why_not = why
        self._end()

    def settle(self) -> None:
        """Waits until NCCL has done what it was given.

        Raises:
            NcclFailedError, WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As joining a step.
        """
        if self._communicator is not None:
            self._transfers.wait_for_own_path()

    def leave(self) -> None:
        """Settles, then gives NCCL up when the others are through as well; waits for none of them."""
        self.settle()
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            timer = threading.Timer(_ABORTED_AFTER_S, communicator.abort)
            timer.daemon = True
            atexit.register(timer.cancel)  # which ends everything in any case
            with contextlib.suppress(RuntimeError):  # no thread can be started while the interpreter ends
                timer.start()

    @property
    def _transfers(self) -> GpuTransfers:
        assert self._group.gpu is not None
        return self._group.gpu

    def _end(self) -> None:
        if self._communicator is None:
            return
        self.settle()
        self._group.meeting.wait()  # others may read this worker's memory until they are through, too
        self._set_flags([0] * self._group.num_shards)
        self._transfers.use_own_path(None, 0)
        self._communicator = None

    def _set_flags(self, flags: Sequence[int]) -> None:
        self._native.set_path_flags(self._group.id, flags)


def less_accurate_by_nccl(specs: Sequence[TensorSpec]) -> str:
    """Which tensors NCCL would reduce less accurately than memory devices do, in words; "" if there are none."""
    for spec in specs:
        if spec.dtype not in _DTYPES or spec.op == "max":
            return f"NCCL would not have the accuracy of memory devices for the {spec.op} of {spec.dtype}"
    return ""

"""The workers' own path, in the memory that they share or between their GPUs (COARSE paper, section III-F;
docs/design/planning.md).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from coarse.client.schema import TensorSpec
from coarse.kernels import _native

if TYPE_CHECKING:
    from coarse.client.tensor_group import TensorGroup

_NCCL_FLAGS = _native.OWN_PATH | _native.BY_NCCL
_NCCL_DTYPES = ("float32", "float64")  # others it rounds or truncates at each addition
_ABORTED_AFTER_S = 5.0  # workers that are microseconds behind may still read this one's memory


class Meeting:
    """Where all workers of a node come together over one tensor group, in whichever order groups are worked on.

    Made by Client.open_meeting().

    Args:
        group: Two tensors: a byte, and as many numbers as are compared at once.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        numbers = group.buffer(1)
        assert isinstance(numbers, memoryview)
        self._numbers = numbers.cast("d")

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
        for index in range(len(self._numbers)):
            self._numbers[index] = numbers[index] if index < len(numbers) else 0.0
        self._group.push(1)
        self._group.pull(1)
        return list(self._numbers[: len(numbers)])

    def close(self) -> None:
        """Gives its memory up. Idempotent."""
        self._group.close()


class HostOwnPath:
    """Reduces tensors on the workers' own processors: each worker a piece, in all slots, then everyone takes them.

    The arithmetic and the order of workers are those of the memory devices, so that results have the same bits.

    Args:
        native: Of this worker.
        group: Number of the tensor group, of which workers see each other's slots.
        num_workers: Of the node.
        meeting: Of this tensor group alone, since groups may end their steps in any order.
    """

    def __init__(self, native: _native.Client, group: int, num_workers: int, meeting: Meeting) -> None:
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


class NcclOwnPath:
    """Has NCCL reduce shards between the workers' GPUs.

    Args:
        native: Of this worker.
        group: Number of the tensor group.
        transfers: By which its tensors are pushed from the GPU.
        slots: Where the GPU sees the slots, if tensors lie there; else 0.
        meeting: Of the group.
        check: Makes a native call, and an error of its end unless it was a good one.
    """

    def __init__(
        self,
        native: _native.Client,
        group: int,
        transfers: _native.GpuTransfers,
        slots: int,
        meeting: Meeting,
        check: Callable[[Callable[[], _native.WaitStatus]], None],
    ) -> None:
        self._native = native
        self._group = group
        self._transfers = transfers
        self._slots = slots
        self._meeting = meeting
        self._check = check
        self._communicator: _native.NcclCommunicator | None = None  # while shards go this way

    def use(self, communicator: _native.NcclCommunicator, shards: Sequence[int], *, num_shards: int) -> None:
        """Has NCCL reduce these from the next push on, in this order; every worker calls it alike, between two steps.

        Args:
            communicator: Of the workers.
            shards: None for nothing any more.
            num_shards: Of the group.
        """
        self.stop(num_shards=num_shards)
        if not shards:
            return
        own = set(shards)
        self._native.set_path_flags(
            self._group, [_NCCL_FLAGS if shard in own else 0 for shard in range(num_shards)]
        )
        self._transfers.use_own_path(
            _native.GpuOwnPath(communicator, self._native, self._group, shards), self._slots
        )
        self._communicator = communicator

    def stop(self, *, num_shards: int) -> None:
        """Has memory devices reduce everything; as use() without shards."""
        if self._communicator is None:
            return
        self.settle()
        self._meeting.wait()  # others may read this worker's memory until they are through, too
        self._native.set_path_flags(self._group, [0] * num_shards)
        self._transfers.use_own_path(None, 0)
        self._communicator = None

    def settle(self) -> None:
        """Waits until NCCL has done what it was given here.

        Raises:
            NcclFailedError, WorkerLostError, MemoryDeviceLostError, SyncTimeoutError: As joining a step.
        """
        self._check(self._transfers.wait_for_own_path)

    def leave(self) -> None:
        """Gives NCCL up when the others are through as well; nobody waits for anybody."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            timer = threading.Timer(_ABORTED_AFTER_S, communicator.abort)
            timer.daemon = True
            atexit.register(timer.cancel)  # which ends everything in any case
            with contextlib.suppress(RuntimeError):  # no thread can be started while the interpreter ends
                timer.start()


def less_accurate_by_nccl(specs: Sequence[TensorSpec]) -> str:
    """Which tensors NCCL would reduce less accurately than memory devices do, in words; "" if there are none."""
    for spec in specs:
        if spec.dtype not in _NCCL_DTYPES or spec.op == "max":
            return f"NCCL would not have the accuracy of memory devices for the {spec.op} of {spec.dtype}"
    return ""

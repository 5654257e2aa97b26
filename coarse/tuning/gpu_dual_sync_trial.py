"""Measures two ways between GPUs, through memory devices and by NCCL between workers, before tensors are divided
between them (COARSE paper, section III-F; docs/design/planning.md).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from coarse.client.memory.tensor_bytes import gpu_context
from coarse.errors import CoarseError, NcclFailedError, SyncTimeoutError, is_refusal
from coarse.kernels import _native
from coarse.profiler.dual_sync import SyncCosts
from coarse.schema import TensorSpec
from coarse.tuning.measure import gather_bytes
from coarse.tuning.tuned_session import TunedSession

if TYPE_CHECKING:
    from coarse.client.tensor_group import TensorGroup

_TRIAL = [
    TensorSpec(name=f"half {i}", dtype="float32", num_elements=(16 << 20) // 4, op="mean") for i in range(2)
]
_NUM_TRIALS = 5  # the first is a warm-up and is not counted
_TRIAL_LIMIT_S = 30.0

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTimes:
    """Seconds of a push and a pull of `num_bytes` by all workers.

    Args:
        num_bytes: Bytes of each worker.
        by_devices: Time of all bytes through the memory devices.
        by_workers: Time of all bytes by NCCL.
        by_both: Time of one half each way, at once.
    """

    num_bytes: int
    by_devices: float
    by_workers: float
    by_both: float

    def costs(self) -> SyncCosts:
        """Costs per byte of either way, and of shared links if both together take longer than the slower half.

        With a and g seconds per byte, halves that share no link take max(a, g) n / 2; halves that share all links
        take (a + g) n / 2. Between these, a shared link is busy for the same share of both ways' times.
        """
        devices, workers = self.by_devices / self.num_bytes, self.by_workers / self.num_bytes
        share = min(1.0, 2 * self.by_both / (self.by_devices + self.by_workers))
        return SyncCosts(
            proxy_s_per_byte=devices, worker_s_per_byte=workers, shared=((share * devices, share * workers),)
        )

    def describe(self) -> str:
        """The times in words."""
        return (
            f"{self.num_bytes >> 20} MiB took {self.by_devices * 1e3:.2f} ms through the memory devices, "
            f"{self.by_workers * 1e3:.2f} ms by NCCL between the workers, {self.by_both * 1e3:.2f} ms half by "
            "each"
        )


class RefusedError(Exception):
    """Raised on every worker: the reason why nothing is split."""


def check_all(session: TunedSession, reason: str) -> None:
    """Raises RefusedError on every worker if one has a reason."""
    for rank, each in enumerate(gather_bytes(session, reason.encode())):
        if each:
            raise RefusedError(f"worker {rank}: {each.decode()}")


def measure_both_ways(session: TunedSession, communicator: _native.NcclCommunicator, gpu: str) -> TrialTimes:
    """Times both ways alone, and both at once; every worker calls it and gets the same times.

    Raises:
        RefusedError: If memory devices or GPUs have too little memory, or NCCL fails.
    """
    try:
        group = session.register_trial("trial of dual synchronisation", _TRIAL, gpu)
        group.open_node_barrier()
    except CoarseError as error:
        if not is_refusal(error):
            raise
        raise RefusedError(str(error)) from error
    trial = _Trial(session, group, communicator, gpu)
    try:
        trial.open()
        seconds = trial.time_splits()
    except RefusedError:
        communicator.abort()
        trial.end_unfinished()
        raise
    finally:
        group.close()
    by_devices, by_workers, by_both = _largest(session, seconds)
    num_bytes = sum(spec.nbytes for spec in _TRIAL)
    return TrialTimes(num_bytes=num_bytes, by_devices=by_devices, by_workers=by_workers, by_both=by_both)


class _Trial:
    """One worker's part of the trial. All workers call its methods together, and these fail on all or on none.

    Args:
        session: The workers' session.
        group: The group of _TRIAL. Close it before this object is freed, because this object holds the memory of its
            tensors.
        communicator: The workers' communicator.
        gpu: UUID of this worker's GPU.
    """

    def __init__(
        self, session: TunedSession, group: TensorGroup, communicator: _native.NcclCommunicator, gpu: str
    ) -> None:
        self._session = session
        self._group = group
        self._communicator = communicator
        self._gpu = gpu
        self._limit_s = min(_TRIAL_LIMIT_S, session.settings.timeout_s / 4)
        self._memories: list[_native.CudaMemory] = []
        self._streams: list[_native.CudaStream] = []
        self._num_pushed = 0

    def open(self) -> None:
        """Allocates memory for the tensors.

        Raises:
            RefusedError: If a worker has too little memory, or its GPU cannot push from it.
        """

        def take() -> None:
            context = gpu_context(self._gpu)
            self._streams.append(_native.CudaStream(context))
            if not self._group.is_on_gpu:
                for spec in _TRIAL:
                    self._memories.append(_native.CudaMemory.allocate(context, spec.nbytes))
            self._group.open_gpu_transfers(context, timeout_s=self._limit_s)

        self._together(take)

    def time_splits(self) -> list[float]:
        """This worker's seconds by memory devices, by NCCL, and half and half.

        Raises:
            RefusedError: If any worker fails.
        """
        tensor_of = self._group.tensors_of_shards()
        every = range(len(tensor_of))
        half = [shard for shard in every if tensor_of[shard] == 0]
        seconds = [self._together(partial(self._least_seconds, own)) for own in ((), every, half)]
        self._group.nccl.use(self._communicator, ())
        return seconds

    def end_unfinished(self) -> None:
        """Completes pending tensors after an error, so that no worker waits for another's contribution."""
        counts = [int(each) for each in gather_bytes(self._session, str(self._num_pushed).encode())]
        with contextlib.suppress(CoarseError):
            if self._num_pushed < max(counts):
                self._group.pull_all(
                    self._limit_s
                )  # tensors that other workers have completed are complete here
                for tensor in range(len(_TRIAL)):
                    self._group.push(tensor, present=False)
            self._group.pull_all(self._limit_s)

    def _together(self, work: Callable[[], _Result]) -> _Result:
        """Returns the result of this worker's `work`.

        Raises:
            RefusedError: If it fails on any worker.
        """
        reason = ""
        try:
            result = work()
        except (_native.CudaError, NcclFailedError, SyncTimeoutError) as error:
            reason = str(error)
        check_all(self._session, reason)
        return result

    def _least_seconds(self, own: Sequence[int]) -> float:
        """The shortest of several exchanges with these shards by NCCL; does not count the first."""
        self._group.nccl.use(self._communicator, own)
        seconds = [self._exchange() for _ in range(_NUM_TRIALS)]
        self._group.nccl.synchronize()
        return min(seconds[1:])

    def _exchange(self) -> float:
        """Seconds of one exchange, which starts when the previous one has ended on all workers."""
        (stream,), transfers = self._streams, self._group.gpu
        assert transfers is not None
        addresses = [memory.address for memory in self._memories] or [0] * len(_TRIAL)  # 0 for the slot
        began_s = time.perf_counter()
        transfers.push(
            [(i, _native.PRESENT, address, address, 0) for i, address in enumerate(addresses)], stream.handle
        )
        self._num_pushed += 1
        transfers.join(stream.handle)
        stream.synchronize()
        transfers.check()
        seconds = time.perf_counter() - began_s
        self._group.pull_all(self._limit_s)
        return seconds


def _largest(session: TunedSession, seconds: Sequence[float]) -> list[float]:
    """The largest value of each time over all workers."""
    numbers = np.array(seconds)
    session.all_reduce(numbers, op="max")
    return [float(number) for number in numbers]

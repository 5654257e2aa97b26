"""Dual synchronisation of workers on GPUs: the memory devices reduce some shards of a step, NCCL between the workers'
GPUs all others (COARSE paper, section III-F; docs/design/planning.md).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from coarse.client.schema import TensorSpec
from coarse.client.tensor_bytes import gpu_context
from coarse.client.workers_nccl import join_workers
from coarse.errors import CoarseError, NcclFailedError, SyncTimeoutError, is_refusal
from coarse.kernels import _native
from coarse.profiler.dual_sync import DualSyncInputs, SyncCosts, parse_mode, plan_dual_sync
from coarse.profiler.first_steps import TIMED_STEPS, FirstSteps, shards_in_order
from coarse.profiler.gpu_step_clock import GpuStepClock
from coarse.profiler.measure import gather_bytes
from coarse.profiler.step_clock import StepClock

if TYPE_CHECKING:
    from coarse.client.tensor_group import TensorGroup
    from coarse.session import Session

logger = logging.getLogger(__name__)

_TRIAL = [
    TensorSpec(name=f"half {i}", dtype="float32", num_elements=(16 << 20) // 4, op="mean") for i in range(2)
]
_NUM_TRIALS = 5  # of which the first is not counted
_TRIAL_LIMIT_S = 30.0

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTimes:
    """Seconds of a push and a pull of `num_bytes` by all workers.

    Args:
        num_bytes: Of each worker.
        by_devices: Everything through the memory devices.
        by_workers: Everything by NCCL.
        by_both: One half each, at once.
    """

    num_bytes: int
    by_devices: float
    by_workers: float
    by_both: float

    def costs(self) -> SyncCosts:
        """Of a byte on either way; and of links that both use, where both together take longer than the slower half.

        With a and g seconds a byte, halves that use nothing in common take max(a, g) n / 2, halves that use the same
        (a + g) n / 2. In between lies a link that is at both for the same share of their times.
        """
        devices, workers = self.by_devices / self.num_bytes, self.by_workers / self.num_bytes
        share = min(1.0, 2 * self.by_both / (self.by_devices + self.by_workers))
        return SyncCosts(
            proxy_s_per_byte=devices, worker_s_per_byte=workers, shared=((share * devices, share * workers),)
        )

    def describe(self) -> str:
        """In words."""
        return (
            f"{self.num_bytes >> 20} MiB took {self.by_devices * 1e3:.2f} ms through the memory devices, "
            f"{self.by_workers * 1e3:.2f} ms by NCCL between the workers, {self.by_both * 1e3:.2f} ms half and half"
        )


class GpuDualSync:
    """Watches the first steps of one tensor group, then splits its shards between memory devices and NCCL.

    Like Replanner it works between two steps, after the same one on every worker. A split does change results: NCCL
    adds in an order of its own.

    Args:
        session: Of the group.
        group: Whose tensors are on a GPU, on every worker.
        gpu: That of this worker, by UUID.
        mode: "auto", or bytes that go to the memory devices.
    """

    def __init__(self, session: Session, group: TensorGroup, *, gpu: str, mode: str) -> None:
        self._session = session
        self._group = group
        self._gpu = gpu
        self._mode = parse_mode(mode)
        self._clock: StepClock | None = None
        self.decisions: list[str] = []
        """What was decided, a line each."""
        group.claims_nccl = True
        group.open_meeting()
        group.watch(self._pushed, self._step_done)

    def _pushed(self, tensors: Sequence[int]) -> None:
        if self._clock is None:
            context = self._group.gpu_context
            self._clock = (
                StepClock() if context is None else GpuStepClock(context, lambda: self._group.gpu_stream)
            )
        self._clock.pushed(tensors)

    def _step_done(self, contributors: Sequence[int]) -> None:
        """Everything of a step has been pulled, by every worker alike."""
        if self._clock is None:
            return  # nothing was pushed
        self._clock.pulled_all()
        if max(contributors) < self._group.num_workers or self._clock.num_steps < TIMED_STEPS:
            return  # a worker that has run out of inputs comes later than the others
        self._group.watch(None, None)
        if self._session.identity.rank == 0:
            logger.info("[w0] timing NCCL between the workers against memory devices")
        try:
            check_all(self._session, self._cannot_split())
            communicator = self._join()
            times = measure_both_ways(self._session, communicator, self._gpu)
        except RefusedError as error:
            self._group.claims_nccl = False
            self._decide(f"dual synchronisation: none in {self._group.name}: {error}")
        else:
            steps = FirstSteps(self._clock, self._group, is_first=self._session.identity.rank == 0)
            self._split(steps, communicator, times)

    def _cannot_split(self) -> str:
        """Why this worker's tensors are all for the memory devices; "" if they need not be."""
        assert self._clock is not None
        if sorted(self._clock.order) != list(range(len(self._group.specs))):
            return "not all of its tensors are pushed in a step"
        return self._group.cannot_use_nccl()

    def _split(self, steps: FirstSteps, communicator: _native.NcclCommunicator, times: TrialTimes) -> None:
        forward_s, backward_s, _ = steps.medians_s()
        order = steps.order()
        ready_s = steps.ready_s(order, backward_s)
        tensor_of, sizes = self._group.tensors_of_shards(), self._group.shard_sizes()
        pushed = shards_in_order(order, tensor_of)
        plan = plan_dual_sync(
            DualSyncInputs(
                tensor_bytes=tuple(sizes[shard] for shard in pushed),
                forward_s=forward_s,
                backward_s=backward_s,
                costs=times.costs(),
                ready_s=tuple(ready_s[tensor_of[shard]] for shard in pushed),
            ),
            mode=self._mode,
        )
        own = [shard for position, shard in enumerate(pushed) if position not in plan.offloaded]
        self._group.use_nccl(communicator, own)
        if not own:
            self._group.claims_nccl = False
            communicator.abort()
        self._decide(times.describe())
        self._decide(
            f"dual synchronisation: {plan.num_offloaded} of {len(pushed)} shards, {plan.m_bytes} of {sum(sizes)} "
            f"bytes, go to the memory devices{', the others by NCCL between the workers' if own else ''} "
            f"(T_FP {forward_s * 1e3:.3g} ms, T_BP {backward_s * 1e3:.3g} ms): {plan.reason}"
        )

    def _join(self) -> _native.NcclCommunicator:
        session = self._session
        try:
            return join_workers(
                lambda own: gather_bytes(session, own),
                number=session.node_workers.index(session.identity.rank),
                gpu=self._gpu,
                timeout_s=session.settings.timeout_s,
                check_others=session.check_others,
            )
        except _native.NcclError as error:  # of every worker
            raise RefusedError(str(error)) from error

    def _decide(self, text: str) -> None:
        self.decisions.append(text)
        if self._session.identity.rank == 0:
            logger.info("[w0] %s", text)


class RefusedError(Exception):
    """Why nothing is split, on every worker."""


def check_all(session: Session, reason: str) -> None:
    """Raises RefusedError on every worker if one has a reason."""
    for rank, each in enumerate(gather_bytes(session, reason.encode())):
        if each:
            raise RefusedError(f"worker {rank}: {each.decode()}")


def measure_both_ways(session: Session, communicator: _native.NcclCommunicator, gpu: str) -> TrialTimes:
    """Times both ways alone, and both at once; every worker calls it alike, and gets the same.

    Raises:
        RefusedError: If memory devices or GPUs have no room for it, or NCCL fails.
    """
    try:
        group = session.register_trial("trial of dual synchronisation", _TRIAL, gpu)
        group.open_meeting()
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
    """One worker's end of it. Its methods are called by all workers alike, and fail on all or on none.

    Args:
        session: Of the workers.
        group: Of _TRIAL; to be closed before this goes, which has the memory of its tensors.
        communicator: Of the workers.
        gpu: That of this worker, by UUID.
    """

    def __init__(
        self, session: Session, group: TensorGroup, communicator: _native.NcclCommunicator, gpu: str
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
        """Takes memory for the tensors.

        Raises:
            RefusedError: If a worker has none, or its GPU cannot push from it.
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
        """Seconds of this worker by memory devices, by NCCL, and half and half.

        Raises:
            RefusedError: If something fails on a worker.
        """
        tensor_of = self._group.tensors_of_shards()
        every = range(len(tensor_of))
        half = [shard for shard in every if tensor_of[shard] == 0]
        seconds = [self._together(partial(self._least_seconds, own)) for own in ((), every, half)]
        self._group.use_nccl(self._communicator, ())
        return seconds

    def end_unfinished(self) -> None:
        """Has no worker wait for another one's contribution, after an error of whichever."""
        counts = [int(each) for each in gather_bytes(self._session, str(self._num_pushed).encode())]
        with contextlib.suppress(CoarseError):
            if self._num_pushed < max(counts):
                self._group.pull_all(self._limit_s)  # what others have gone on from is complete
                for tensor in range(len(_TRIAL)):
                    self._group.push(tensor, present=False)
            self._group.pull_all(self._limit_s)

    def _together(self, work: Callable[[], _Result]) -> _Result:
        """What this worker's work returns.

        Raises:
            RefusedError: If it has failed on any worker.
        """
        reason = ""
        try:
            result = work()
        except (_native.CudaError, NcclFailedError, SyncTimeoutError) as error:
            reason = str(error)
        check_all(self._session, reason)
        return result

    def _least_seconds(self, own: Sequence[int]) -> float:
        """Of several exchanges with these shards by NCCL, of which the first is not counted."""
        self._group.use_nccl(self._communicator, own)
        seconds = [self._exchange() for _ in range(_NUM_TRIALS)]
        self._group.settle_nccl()
        return min(seconds[1:])

    def _exchange(self) -> float:
        """Seconds of one, which begins when the one before has ended on all workers."""
        (stream,) = self._streams
        addresses = [memory.address for memory in self._memories] or [0] * len(_TRIAL)  # 0 for the slot
        began_s = time.perf_counter()
        self._group.push_from_gpu(
            [(i, _native.PRESENT, address, address, 0) for i, address in enumerate(addresses)], stream.handle
        )
        self._num_pushed += 1
        self._group.join_gpu(stream.handle)
        stream.synchronize()
        self._group.check_gpu()
        seconds = time.perf_counter() - began_s
        self._group.pull_all()
        return seconds


def _largest(session: Session, seconds: Sequence[float]) -> list[float]:
    """Of each time that of the worker for which it is longest."""
    numbers = np.array(seconds)
    session.all_reduce(numbers, op="max")
    return [float(number) for number in numbers]

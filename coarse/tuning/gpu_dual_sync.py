"""Dual synchronisation of workers on GPUs: memory devices reduce some shards of a step, and NCCL between the workers'
GPUs reduces the others (COARSE paper, section III-F; docs/design/planning.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coarse.client.gpu.workers_nccl import join_workers
from coarse.kernels import _native
from coarse.profiler.dual_sync import DualSyncInputs, parse_mode, plan_dual_sync
from coarse.tuning.first_steps import TIMED_STEPS, FirstSteps, shards_in_order
from coarse.tuning.gpu_dual_sync_trial import RefusedError, TrialTimes, check_all, measure_both_ways
from coarse.tuning.gpu_step_clock import GpuStepClock
from coarse.tuning.measure import gather_bytes
from coarse.tuning.step_clock import StepClock
from coarse.tuning.tuned_session import TunedSession

if TYPE_CHECKING:
    from coarse.client.tensor_group import TensorGroup

logger = logging.getLogger(__name__)


class GpuDualSync:
    """Watches the first steps of one tensor group, then splits its shards between memory devices and NCCL.

    Like Replanner it works between two steps, after the same step on every worker. A split changes results: NCCL
    adds in its own order.

    Args:
        session: The group's session.
        group: A group whose tensors are on a GPU, on every worker.
        gpu: UUID of this worker's GPU.
        mode: "auto", or the number of bytes for the memory devices.
    """

    def __init__(self, session: TunedSession, group: TensorGroup, *, gpu: str, mode: str) -> None:
        self._session = session
        self._group = group
        self._gpu = gpu
        self._mode = parse_mode(mode)
        self._clock: StepClock | None = None
        self.decisions: list[str] = []
        """Decisions, one line each."""
        group.nccl.is_claimed = True
        group.open_node_barrier()
        group.watch(self._pushed, self._step_done)

    def _pushed(self, tensors: Sequence[int]) -> None:
        if self._clock is None:
            gpu = self._group.gpu
            self._clock = StepClock() if gpu is None else GpuStepClock(gpu.context, lambda: gpu.stream)
        self._clock.pushed(tensors)

    def _step_done(self, contributors: Sequence[int]) -> None:
        """Called when every worker has pulled all tensors of a step."""
        if self._clock is None:
            return  # nothing was pushed
        self._clock.pulled_all()
        if max(contributors) < self._group.num_workers or self._clock.num_steps < TIMED_STEPS:
            return  # a worker that has run out of inputs is later than the others
        self._group.watch(None, None)
        if self._session.identity.rank == 0:
            logger.info("[w0] timing NCCL between the workers against memory devices")
        try:
            check_all(self._session, self._cannot_split())
            communicator = self._join()
            times = measure_both_ways(self._session, communicator, self._gpu)
        except RefusedError as error:
            self._group.nccl.is_claimed = False
            self._decide(f"dual synchronisation: none in {self._group.name}: {error}")
        else:
            steps = FirstSteps(self._clock, self._group, is_first=self._session.identity.rank == 0)
            self._split(steps, communicator, times)

    def _cannot_split(self) -> str:
        """Why memory devices must reduce all of this worker's tensors; "" if they need not."""
        assert self._clock is not None
        if sorted(self._clock.order) != list(range(len(self._group.specs))):
            return "not all of its tensors are pushed in a step"
        return self._group.nccl.cannot_use()

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
        self._group.nccl.use(communicator, own)
        if own:
            self._session.metrics_writer.add("coarse_replans_total")
        else:
            self._group.nccl.is_claimed = False
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
        except _native.NcclError as error:  # every worker gets it
            raise RefusedError(str(error)) from error

    def _decide(self, text: str) -> None:
        self.decisions.append(text)
        if self._session.identity.rank == 0:
            logger.info("[w0] %s", text)

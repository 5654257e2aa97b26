"""Timings of a group's first steps, agreed on by all workers: durations, and when tensors were ready."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from coarse.client.tensor_group import TensorGroup

TIMED_STEPS = 3
"""Whole steps from which T_FP and T_BP are computed, after one step that only starts the clock."""


class Clock(Protocol):
    """Times the steps of one worker: StepClock, GpuStepClock."""

    order: list[int]
    """Tensors in the order of their last pushes."""

    def medians_s(self) -> tuple[float, float, float]:
        """Seconds of the forward pass, the backward pass and the whole step."""

    def ready_s(self) -> list[float]:
        """Seconds from the first push of a step to that of each tensor of `order`."""


class FirstSteps:
    """Steps that were timed on every worker; all workers call each method between the same two steps.

    Args:
        clock: This worker's clock, with TIMED_STEPS steps.
        group: The group of the steps; has a node barrier.
        is_first: Whether this worker's order of pushes counts; others may have pushed in another order.
        time_dilation: Real seconds for each second of the emulated machine.
    """

    def __init__(
        self, clock: Clock, group: TensorGroup, *, is_first: bool, time_dilation: float = 1.0
    ) -> None:
        self._clock = clock
        self._group = group
        self._is_first = is_first
        self._dilation = time_dilation

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The largest value of each time over all workers."""
        return self._group.barrier.largest(seconds)

    def medians_s(self) -> tuple[float, float, float]:
        """Seconds of the forward pass, the backward pass and the whole step, each of the slowest worker."""
        forward_s, backward_s, step_s = self.slowest(
            [each / self._dilation for each in self._clock.medians_s()]
        )
        return forward_s, backward_s, step_s

    def order(self) -> list[int]:
        """Tensors in the order in which the first worker pushed them."""
        num_tensors = len(self._group.specs)
        order = self._group.barrier.largest(self._clock.order if self._is_first else [0] * num_tensors)
        return [int(tensor) for tensor in order]

    def ready_s(self, order: Sequence[int], backward_s: float) -> dict[int, float]:
        """When each tensor is ready in the backward pass, on the slowest worker; never decreases along `order`."""
        by_tensor = [0.0] * len(order)
        for tensor, ready_s in zip(self._clock.order, self._clock.ready_s(), strict=True):
            by_tensor[tensor] = ready_s / self._dilation
        slowest = self.slowest(by_tensor)
        moments = accumulate((slowest[tensor] for tensor in order), max)
        return {tensor: min(ready_s, backward_s) for tensor, ready_s in zip(order, moments, strict=True)}


def shards_in_order(tensors: Sequence[int], tensors_of_shards: Sequence[int]) -> list[int]:
    """Shards in the order in which their tensors are pushed."""
    position = {tensor: position for position, tensor in enumerate(tensors)}
    return sorted(range(len(tensors_of_shards)), key=lambda shard: position[tensors_of_shards[shard]])

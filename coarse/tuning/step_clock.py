"""T_FP and T_BP of a job, measured from the pushes of its first steps (COARSE paper, section III-F)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median


class StepClock:
    """Splits steps into the time before the first push and the time between the pushes.

    A step lasts from the end of one pull of all tensors to the end of the next. The time before the first push is the
    forward pass and the script's other work. The time between the first and the last push is the backward pass,
    except for its part before the first gradient.

    Args:
        clock: A monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = -1.0
        self._first_push = -1.0
        self._last_push = -1.0
        self._forward_s: list[float] = []
        self._backward_s: list[float] = []
        self._step_s: list[float] = []
        self._ready_s: dict[int, list[float]] = {}
        self.order: list[int] = []

    @property
    def num_steps(self) -> int:
        """Whole steps that were timed."""
        return len(self._step_s)

    def pushed(self, tensors: Sequence[int]) -> None:
        """Records that tensors were pushed, in this order."""
        self._last_push = self._clock()
        if self._first_push < 0:
            self._first_push = self._last_push
            self.order = []
        self.order.extend(tensors)
        for tensor in tensors:
            self._ready_s.setdefault(tensor, []).append(self._last_push - self._first_push)

    def pulled_all(self) -> None:
        """Records the end of a step: all tensors have been pulled."""
        now = self._clock()
        if self._began >= 0 and self._first_push >= 0:
            self._forward_s.append(self._first_push - self._began)
            self._backward_s.append(self._last_push - self._first_push)
            self._step_s.append(now - self._began)
        self._began, self._first_push = now, -1.0

    def medians_s(self) -> tuple[float, float, float]:
        """Seconds of the forward pass, the backward pass and the whole step.

        Raises:
            ValueError: If no whole step was timed.
        """
        if not self._step_s:
            raise ValueError("no whole step was timed")
        return median(self._forward_s), median(self._backward_s), median(self._step_s)

    def ready_s(self) -> list[float]:
        """Seconds from the first push of a step to the push of each tensor of `order`, in that order: medians."""
        return [median(self._ready_s[tensor]) for tensor in self.order]

    def restart(self) -> None:
        """Discards the timed steps."""
        self._forward_s, self._backward_s, self._step_s = [], [], []
        self._ready_s = {}

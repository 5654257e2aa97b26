"""T_FP and T_BP of a job on a GPU, measured by the GPU (COARSE paper, section III-F)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coarse.kernels import _native
from coarse.tuning.step_clock import StepClock


class GpuStepClock(StepClock):
    """Like StepClock, by GPU events, because the processor runs ahead of the GPU.

    At the end of each step the processor waits for the GPU.

    Args:
        context: Context of the GPU.
        current_stream: Handle of the stream that computes, in the calling thread.
    """

    def __init__(self, context: _native.CudaContext, current_stream: Callable[[], int]) -> None:
        super().__init__(lambda: self._now_s)
        self._now_s = 0.0
        self._context = context
        self._current_stream = current_stream
        self._started: _native.CudaEvent | None = None
        self._pushes: list[tuple[_native.CudaEvent, Sequence[int]]] = []

    def pushed(self, tensors: Sequence[int]) -> None:
        self._pushes.append((self._mark(), tensors))

    def pulled_all(self) -> None:
        ended = self._mark()
        ended.synchronize()
        if self._started is not None:
            started_s = self._now_s
            for event, tensors in self._pushes:
                self._now_s = started_s + event.milliseconds_since(self._started) / 1e3
                super().pushed(tensors)
            self._now_s = started_s + ended.milliseconds_since(self._started) / 1e3
        super().pulled_all()
        self._started, self._pushes = ended, []

    def _mark(self) -> _native.CudaEvent:
        event = _native.CudaEvent(self._context, is_timed=True)
        event.record(self._current_stream())
        return event

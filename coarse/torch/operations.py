"""Names a worker's operations in the job's timeline, and in torch's profiler as "coarse::..."; times optimizers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from coarse.metrics.writer import MetricsWriter
from coarse.timeline import recorder


def is_profiled() -> bool:
    """Whether torch's profiler records this thread."""
    return bool(torch._C._autograd._profiler_enabled())


class operation:  # noqa: N801 - used like a function
    """Records the time of a `with` block under a name; costs about a microsecond if nobody records."""

    __slots__ = ("_began_ns", "_function", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._function = torch.profiler.record_function(f"coarse::{self._name}") if is_profiled() else None
        if self._function is not None:
            self._function.__enter__()
        self._began_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        recorder.record(self._name, self._began_ns, time.monotonic_ns())
        if self._function is not None:
            self._function.__exit__(None, None, None)


_REMOTE_OPTIMIZERS = "coarse.torch.optimizer."
"""Module of optimizers that wait for memory devices, or for the optimizer that they wrap, which is counted itself."""


@functools.cache
def record_optimizer_steps(metrics: Callable[[], MetricsWriter]) -> None:
    """Records and counts the steps of all optimizers of this process from now on. Idempotent.

    Args:
        metrics: Returns where to count.
    """
    began_ns: dict[int, int] = {}  # of running steps; one that raises is not recorded

    def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            began_ns[id(optimizer)] = time.monotonic_ns()

    def end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or (began := began_ns.pop(id(optimizer), None)) is None:
            return
        ended = time.monotonic_ns()
        recorder.record(f"step {type(optimizer).__name__}", began, ended)
        if not type(optimizer).__module__.startswith(_REMOTE_OPTIMIZERS):
            metrics().observe("coarse_optimizer_seconds", (ended - began) / 1e9)

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)

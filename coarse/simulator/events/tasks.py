"""The unit of a simulation: a task that waits for others, may queue, moves bytes through buckets, and arrives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from coarse.simulator.events.fair_sharing import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A transfer, a reduction on sync cores, or a moment of computation.

    It is ready at `ready_s` or when the last task of `after` has finished. It then waits for its turn in `queue`,
    spends `overhead_s` there, moves `nbytes`, leaves the queue, and finishes `latency_s` later.

    Args:
        name: Unique in a simulation.
        after: Names of tasks that must finish first.
        ready_s: Earliest start, in seconds.
        queue: Name of a queue that serves as many tasks at a time as it has channels (a copy engine, a stream);
            "" for none. First ready, first served; ties go to the lower `order`, then to the name.
        order: Place among tasks that are ready at the same moment.
        overhead_s: The host's time before the first byte.
        nbytes: Bytes to move; 0 for a task of time alone.
        usage: Buckets that the bytes cross, each with its bytes per byte of the task.
        latency_s: Time from the last byte to the end.

    Raises:
        ValueError: If a number is negative or not finite, or bytes have no bucket to cross.
    """

    name: str
    after: tuple[str, ...] = ()
    ready_s: float = 0.0
    queue: str = ""
    order: int = 0
    overhead_s: float = 0.0
    nbytes: float = 0.0
    usage: Usage = ()
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.ready_s, self.overhead_s, self.nbytes, self.latency_s)
        if min(numbers) < 0 or not math.isfinite(sum(numbers)):
            raise ValueError(f"task {self.name}: times and bytes must be finite and at least 0: {self}")
        if self.nbytes and not any(weight > 0 for _, weight in self.usage):
            raise ValueError(f"task {self.name} moves {self.nbytes:g} bytes through no bucket")
        if any(weight < 0 for _, weight in self.usage):
            raise ValueError(f"task {self.name} has a negative weight: {self.usage}")


class TaskTimes(NamedTuple):
    """Moments of a task, in simulated seconds: ready, served by its queue, first byte, last byte, finished."""

    ready_s: float
    served_s: float
    first_byte_s: float
    last_byte_s: float
    finished_s: float

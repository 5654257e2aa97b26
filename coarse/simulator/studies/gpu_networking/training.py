"""Speed-up by a faster all-reduce of the training workloads of slides 17 and 38, of which a share waits for it."""

from __future__ import annotations

from coarse.simulator.events.engine import simulate
from coarse.simulator.events.tasks import Task

_REDUCTIONS = 8  # of one simulated iteration; the share alone decides the result


def speedup(blocked: float, all_reduce_speedup: float) -> float:
    """Of a workload whose share `blocked` waits for all-reduces that become `all_reduce_speedup` times as fast.

    The worker computes, then waits for its all-reduce, again and again: nothing overlaps, as 'blocked' says.

    Raises:
        ValueError: If the share is not below 1, or the speed-up not above 0.
    """
    if not 0 <= blocked < 1 or not all_reduce_speedup > 0:
        raise ValueError(f"a share of {blocked} and a speed-up of {all_reduce_speedup} have no meaning")
    return _iteration_s(blocked, 1.0) / _iteration_s(blocked, all_reduce_speedup)


def _iteration_s(blocked: float, all_reduce_speedup: float) -> float:
    tasks: list[Task] = []
    for number in range(_REDUCTIONS):
        compute = Task(
            name=f"compute {number}",
            after=(tasks[-1].name,) if tasks else (),
            queue="worker",
            overhead_s=(1 - blocked) / _REDUCTIONS,
        )
        wait = Task(
            name=f"all-reduce {number}",
            after=(compute.name,),
            queue="network",
            overhead_s=blocked / _REDUCTIONS / all_reduce_speedup,
        )
        tasks += [compute, wait]
    return simulate(tasks, {}).end_s

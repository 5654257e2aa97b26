"""The document's Algorithms 1 to 3: how two GPUs share weights and gradients in one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coarse.simulator.events.engine import simulate
from coarse.simulator.events.fair_sharing import Usage
from coarse.simulator.events.tasks import Task
from coarse.simulator.studies.dgx1.machines import GpuMachine
from coarse.simulator.studies.dgx1.networks import Network

MEMCPY, DIRECT, SHARED, PROTOTYPE = "memcpy", "direct access", "shared memory", "prototype"
ALGORITHMS = (MEMCPY, DIRECT, SHARED, PROTOTYPE)
"""Algorithms 1, 2 and 3, and the prototype of the last (Figure 2-7e): all data in GPU 0, which GPU 1 accesses."""

_READS_OF_WEIGHTS = 2  # forward and backward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """A step of two GPUs.

    Args:
        step_s: Its time.
        from_root: Bytes that crossed the link from GPU 0 to GPU 1.
        to_root: Bytes that crossed it from GPU 1 to GPU 0.
        weight_copies, gradient_copies: Arrays of weights and gradients in all memories.
    """

    step_s: float
    from_root: float
    to_root: float
    weight_copies: int
    gradient_copies: int


_COPIES = {MEMCPY: (2, 3), DIRECT: (1, 2), SHARED: (1, 2), PROTOTYPE: (1, 2)}


def shared_step(algorithm: str, machine: GpuMachine, network: Network, compute_s: float) -> SharedStep:
    """Simulates one step after its weights have left the CPU.

    A kernel that accesses the other GPU's memory takes as long as its computation or the transfer, whichever is
    longer. Shared memory is as fast as a GPU's own.

    Raises:
        ValueError: If the algorithm is unknown.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no algorithm {algorithm!r}; known: {', '.join(ALGORITHMS)}")
    down, up = machine.direct(0, 1), machine.direct(1, 0)
    outcome = simulate(_tasks(algorithm, machine, network, compute_s, down, up), machine.capacities)
    weights, gradients = _COPIES[algorithm]
    return SharedStep(
        step_s=outcome.end_s,
        from_root=outcome.bucket_bytes[down[0][0]],
        to_root=outcome.bucket_bytes[up[0][0]],
        weight_copies=weights,
        gradient_copies=gradients,
    )


def _tasks(
    algorithm: str, machine: GpuMachine, network: Network, compute_s: float, down: Usage, up: Usage
) -> Iterator[Task]:
    kernels = ["compute 0", "compute 1"]
    yield from (Task(name=name, overhead_s=compute_s) for name in kernels)
    if algorithm in (DIRECT, PROTOTYPE):
        kernels.append("remote weights")
        yield Task(name=kernels[-1], nbytes=_READS_OF_WEIGHTS * network.nbytes, usage=down)
    if algorithm == PROTOTYPE:
        kernels.append("remote gradients")
        yield Task(name=kernels[-1], nbytes=network.nbytes, usage=up)
    update = tuple(kernels)
    if algorithm == MEMCPY:
        yield from _copies(machine, network, "gradients", tuple(kernels), up)
        update = ("gradients",)
    if algorithm == DIRECT:
        yield Task(name="read gradients", after=update, nbytes=network.nbytes, usage=up)
        update = ("read gradients",)
    yield Task(name="update", after=update)
    if algorithm == MEMCPY:
        yield from _copies(machine, network, "weights", ("update",), down)


def _copies(
    machine: GpuMachine, network: Network, what: str, after: tuple[str, ...], usage: Usage
) -> Iterator[Task]:
    """One copy after the other, each of an array."""
    yield Task(
        name=what,
        after=after,
        overhead_s=network.num_arrays * machine.dispatch_s,
        nbytes=network.nbytes,
        usage=usage,
        latency_s=network.num_arrays * machine.copy_s,
    )

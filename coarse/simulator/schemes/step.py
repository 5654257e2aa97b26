"""The common interface of schemes: tasks for the engine, made from a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coarse.simulator.events.tasks import Task
from coarse.simulator.machines.network import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one worker and of one memory device at their peak: parameters, gradients, states, slots, copies.

    Activations are not counted; no scheme changes them.
    """

    worker_bytes: float
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The tasks of one training step.

    Args:
        network: The network that they use.
        tasks: The tasks, without computation that never waits.
        memory: Memory of workers and memory devices.
        extra_capacities: Capacities besides those of the network's links, such as sync cores.
        channels: Tasks that a queue serves at once, for queues with more than one channel.
        decisions: What planners decided, in words.
    """

    network: Network
    tasks: tuple[Task, ...]
    memory: MemoryUse
    extra_capacities: Mapping[str, float] = field(default_factory=dict)
    channels: Mapping[str, int] = field(default_factory=dict)
    decisions: tuple[str, ...] = ()

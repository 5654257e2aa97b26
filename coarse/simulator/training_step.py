"""Simulates one training step, and sums it up: times, bytes of links, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from coarse.machine.catalogue import load_machine
from coarse.machine.description import Power
from coarse.simulator.events.engine import Outcome, Progress, simulate
from coarse.simulator.events.first_come import FIRST_COME, simulate_first_come
from coarse.simulator.schemes.catalogue import SCHEMES
from coarse.simulator.schemes.step import MemoryUse, Step
from coarse.simulator.setup import Setup

SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """A bucket during a step.

    Args:
        nbytes: Bytes that crossed it.
        busy: Share of the step that these bytes take at its rate.
        copies: Number of equal buckets with this load each.
    """

    nbytes: float
    busy: float
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Figures of one scheme; all are simulated.

    Args:
        scheme: Its name.
        machine: The machine's name.
        num_workers, num_devices: Endpoints.
        model: The model's name.
        model_bytes: Bytes of its gradients, and of its parameters.
        step_s: Time of the step.
        compute_s: Time in which an undisturbed worker computes it.
        links: Load of each link.
        memory: Memory of a worker and of a memory device.
        decisions: What planners decided.
        num_tasks: Size of the simulation.
        energy_j: Energy of workers and memory devices; None if the machine's file does not state their power.
    """

    scheme: str
    machine: str
    num_workers: int
    num_devices: int
    model: str
    model_bytes: int
    step_s: float
    compute_s: float
    links: Mapping[str, LinkLoad]
    memory: MemoryUse
    decisions: tuple[str, ...]
    num_tasks: int
    energy_j: float | None = None

    @property
    def blocked_s(self) -> float:
        """Time of the step without the computation of an undisturbed worker."""
        return self.step_s - self.compute_s

    @property
    def busiest_link(self) -> str:
        """The link with the largest busy share; "" if none was used."""
        return max(self.links, key=lambda name: self.links[name].busy, default="")

    def as_json(self) -> dict[str, Any]:
        """The fields of a record."""
        return {
            "kind": SIMULATED,
            "scheme": self.scheme,
            "machine": self.machine,
            "num_workers": self.num_workers,
            "num_devices": self.num_devices,
            "model": self.model,
            "step_s": self.step_s,
            "compute_s": self.compute_s,
            "blocked_s": self.blocked_s,
            "worker_memory_bytes": self.memory.worker_bytes,
            "device_memory_bytes": self.memory.device_bytes,
            "links": {
                name: {"bytes": load.nbytes, "busy": load.busy, "copies": load.copies}
                for name, load in self.links.items()
            },
            "decisions": list(self.decisions),
            **({} if self.energy_j is None else {"energy_j": self.energy_j}),
        }


Record = Callable[[StepResult, Step, Outcome], None]
"""Called with a step's figures, its tasks, and their times."""


def simulate_step(
    setup: Setup, scheme: str, progress: Progress | None = None, *, record: Record | None = None
) -> StepResult:
    """Simulates one step under a scheme.

    Args:
        setup: Machine and workload.
        scheme: A name in SCHEMES.
        progress: Called now and then.
        record: Called at the end.

    Raises:
        ValueError: If the scheme is unknown, does not fit the machine, or a slow worker or link does not exist.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"no scheme {scheme!r}; known: {', '.join(SCHEMES)}")
    step = SCHEMES[scheme].build(setup)
    network = step.network
    capacities = setup.disturbances.slowed({**network.capacities, **step.extra_capacities})
    if setup.service == FIRST_COME:
        outcome = simulate_first_come(step.tasks, capacities, progress=progress)
    else:
        outcome = simulate(step.tasks, capacities, channels=step.channels, progress=progress)
    compute_s = setup.trace.forward_s + setup.trace.backward_s
    step_s = max(compute_s * setup.disturbances.slowest(network.num_workers), outcome.end_s)
    sizes = network.orbit_sizes
    result = StepResult(
        scheme=scheme,
        machine=setup.machine,
        num_workers=network.num_workers,
        num_devices=network.num_devices,
        model=setup.trace.model,
        model_bytes=setup.trace.nbytes,
        step_s=step_s,
        compute_s=compute_s,
        links={
            name: LinkLoad(nbytes=nbytes, busy=nbytes / capacities[name] / step_s, copies=sizes[name])
            for name, nbytes in outcome.bucket_bytes.items()
            if name in sizes and nbytes
        },
        memory=step.memory,
        decisions=step.decisions,
        num_tasks=len(step.tasks),
        energy_j=_energy_j(setup, network.num_devices if step.memory.device_bytes else 0, step_s),
    )
    if record is not None:
        record(result, step, outcome)
    return result


def _energy_j(setup: Setup, num_devices: int, step_s: float) -> float | None:
    power = power_of(setup)
    return None if power is None else power.energy_j(setup.num_workers, num_devices, step_s)


def power_of(setup: Setup) -> Power | None:
    """The power by the machine's file; None without a file, or if it states none."""
    return None if setup.is_generated else load_machine(setup.machine).power

"""One training step as tasks: MXNet's tree that is rooted at GPU 0 ("P2P"), and NCCL's rings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from coarse.simulator.events.engine import Outcome, simulate
from coarse.simulator.events.fair_sharing import Usage
from coarse.simulator.events.tasks import Task
from coarse.simulator.studies.dgx1.machines import NS_PER_S, GpuMachine
from coarse.simulator.studies.dgx1.networks import ITEM_BYTES, Layer, Network

_FORWARD_SHARE = 1 / 3  # a backward pass computes two products where a forward pass computes one

GROUP_ARRAYS = 16
"""Arrays that MXNet gives to NCCL together, by default (`MXNET_UPDATE_AGGREGATION_SIZE` in its `model.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training of a network on the first GPUs of a machine.

    Args:
        machine: The machine.
        network: The network.
        num_gpus: 1, 2, 4 or 8.
        batch: Samples of each GPU in a step.
        compute_s: Forward and backward pass of one GPU.
        issue_s: The host's time to issue a step to one GPU; it serves one GPU after the other.

    Raises:
        ValueError: If the number of GPUs is not a power of two.
    """

    machine: GpuMachine
    network: Network
    num_gpus: int
    batch: int
    compute_s: float
    issue_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.num_gpus & (self.num_gpus - 1):
            raise ValueError(f"a tree joins a power of two GPUs, not {self.num_gpus}")

    @property
    def input_bytes(self) -> float:
        """Bytes of one GPU's batch."""
        return self.batch * self.network.sample_bytes

    def input_s(self) -> float:
        """Time to copy a batch to one GPU that shares its lane with no other."""
        return self.machine.host_copy_s + self.input_bytes / (self.machine.host_gbytes_per_s * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A simulated step.

    Args:
        step_s: From the first issue until every GPU has its weights.
        input_s: Time of all copies from the host to GPUs, as a profiler adds it up.
        exchange_s: The same of all copies between GPUs.
        sum_s: Time in which GPU 0 adds gradients that arrived.
        outcome: Moments of all tasks.
    """

    step_s: float
    input_s: float
    exchange_s: float
    sum_s: float
    outcome: Outcome


def tree_step(training: Training) -> StepTimes:
    """A step in which gradients go up a tree to GPU 0, and weights from there to all GPUs.

    A GPU sends one copy at a time. Gradients of a layer start when its backward pass ends, so the tree overlaps with
    the backward pass. Sums and the backward pass share a GPU that has both. GPU 0 sends weights when its backward
    pass has ended: WU follows BP.
    """
    return _simulated(training, tree_tasks(training))


def nccl_step(training: Training) -> StepTimes:
    """A step in which one ring reduces gradients, and a chain broadcasts weights, during the backward pass (2.2.4).

    Arrays come in groups, which follow each other on one stream: a dispatch for the group, the latencies of the hops
    of each array, and its bytes. One GPU runs the same kernels, in its own memory (2.2.3).
    """
    return _simulated(training, nccl_tasks(training))


def tree_tasks(training: Training) -> list[Task]:
    """The tasks of `tree_step`."""
    return [*_computation(training), *_tree(training)]


def nccl_tasks(training: Training) -> list[Task]:
    """The tasks of `nccl_step`."""
    return [*_computation(training), *_rings(training)]


def tree_pairs(num_gpus: int) -> list[tuple[int, int]]:
    """(source, target) of the tree's copies, level by level: 1 > 0 and 3 > 2, then 2 > 0."""
    distances = [1 << level for level in range(num_gpus.bit_length() - 1)]
    return [
        (target + distance, target) for distance in distances for target in range(0, num_gpus, 2 * distance)
    ]


def _simulated(training: Training, tasks: list[Task]) -> StepTimes:
    outcome = simulate(tasks, training.machine.capacities)
    seconds = {"input": 0.0, "copy": 0.0}
    for name, times in outcome.times.items():
        kind = name.split()[0]
        if kind in seconds:
            seconds[kind] += times.finished_s - times.first_byte_s
    return StepTimes(
        step_s=outcome.end_s,
        input_s=seconds["input"],
        exchange_s=seconds["copy"],
        sum_s=sum(task.nbytes for task in tasks if task.name.startswith("sum") and task.name.endswith("> 0"))
        / NS_PER_S,
        outcome=outcome,
    )


def _computation(training: Training) -> Iterator[Task]:
    layers = training.network.layers
    work = sum(layer.work for layer in layers)
    backward_s = (1 - _FORWARD_SHARE) * training.compute_s
    for gpu in range(training.num_gpus):
        yield Task(name=f"issue {gpu}", queue="host", order=gpu, overhead_s=training.issue_s)
        yield Task(
            name=f"input {gpu}",
            after=(f"issue {gpu}",),
            nbytes=training.input_bytes,
            usage=training.machine.from_host(gpu),
            latency_s=training.machine.host_copy_s,
        )
        yield Task(
            name=f"forward {gpu}",
            after=(f"input {gpu}",),
            overhead_s=_FORWARD_SHARE * training.compute_s,
        )
        before = f"forward {gpu}"
        for number, layer in _backward(training.network):
            seconds = backward_s * layer.work / work
            yield _kernel(training.machine, gpu, _gradient(number, gpu), (before,), seconds)
            before = _gradient(number, gpu)


def _kernel(machine: GpuMachine, gpu: int, name: str, after: tuple[str, ...], seconds: float) -> Task:
    """A kernel that takes `seconds` if it has the GPU for itself."""
    return Task(name=name, after=after, nbytes=NS_PER_S * seconds, usage=machine.computing(gpu))


def _backward(network: Network) -> list[tuple[int, Layer]]:
    """Layers with their numbers, in the order of the backward pass."""
    return list(enumerate(network.layers))[::-1]


def _gradient(layer: int, gpu: int) -> str:
    return f"backward {layer} gpu {gpu}"


def _tree(training: Training) -> Iterator[Task]:
    machine = training.machine
    for order, (number, layer) in enumerate(_backward(training.network)):
        ready = {gpu: _gradient(number, gpu) for gpu in range(training.num_gpus)}
        for source, target in tree_pairs(training.num_gpus):
            ends = (source, target)
            legs = _copy(machine, layer, f"gradient {number}", order, ends, [ready[source]])
            yield from legs
            added = _kernel(
                machine,
                target,
                f"sum {number} {source} > {target}",
                (ready[target], legs[-1].name),
                machine.sum_s(layer.nbytes),
            )
            yield added
            ready[target] = added.name
        yield Task(name=f"update {number}", after=(ready[0], _gradient(0, 0)))
        yield from _broadcast(training, number, order, layer)


def _broadcast(training: Training, number: int, order: int, layer: Layer) -> Iterator[Task]:
    """Copies of a layer's weights to all GPUs; a GPU that relays them passes its own copy on."""
    machine = training.machine
    arrived = {0: f"update {number}"}
    relayed = []
    for target in range(1, training.num_gpus):
        via = None if machine.gbytes_per_s(0, target) else machine.relay(0, target)
        if via is not None:
            relayed.append((via, target))
            continue
        legs = _copy(machine, layer, f"weights {number}", order, (0, target), [arrived[0]])
        yield from legs
        arrived[target] = legs[-1].name
    for via, target in relayed:
        yield from _copy(machine, layer, f"weights {number}", order, (via, target), [arrived[via]])


def _copy(
    machine: GpuMachine, layer: Layer, what: str, order: int, ends: tuple[int, int], after: list[str]
) -> list[Task]:
    """The legs of a copy: one over a direct link or by way of the host, two by way of a GPU."""
    source, target = ends
    via = machine.relay(source, target)
    staging_s = 0.0
    if machine.gbytes_per_s(source, target):
        legs = [(source, machine.direct(source, target))]
    elif via is not None:
        legs = [(source, machine.direct(source, via)), (via, machine.direct(via, target))]
    else:
        legs = [(source, (*machine.to_host(source), *machine.from_host(target)))]
        staging_s = machine.staging_s(layer.nbytes)
    tasks: list[Task] = []
    for place, (gpu, usage) in enumerate(legs):
        tasks.append(
            Task(
                name=f"copy {what} {source} > {target} leg {place}",
                after=(tasks[-1].name,) if tasks else tuple(after),
                queue=f"gpu {gpu}",
                order=order,
                overhead_s=layer.num_arrays * machine.dispatch_s + staging_s,
                nbytes=layer.nbytes,
                usage=usage,
                latency_s=layer.num_arrays * machine.copy_s,
            )
        )
    return tasks


class _Group(NamedTuple):
    """Neighbouring arrays that NCCL gets together: the first one's layer, their number and bytes."""

    layer: int
    num_arrays: int
    nbytes: float


def _groups(network: Network) -> list[_Group]:
    """Groups in the order of the backward pass; MXNet counts arrays from the first layer on."""
    arrays = [(number, size) for number, layer in enumerate(network.layers) for size in layer.sizes]
    groups = [arrays[first : first + GROUP_ARRAYS] for first in range(0, len(arrays), GROUP_ARRAYS)]
    return [
        _Group(group[0][0], len(group), ITEM_BYTES * sum(size for _, size in group)) for group in groups[::-1]
    ]


def _rings(training: Training) -> Iterator[Task]:
    machine, num_gpus = training.machine, training.num_gpus
    hops = list(pairwise((*machine.ring(num_gpus), 0))) if num_gpus > 1 else []
    reduced = tuple(
        (bucket, 2 * (num_gpus - 1) / num_gpus) for hop in hops for bucket, _ in machine.direct(*hop)
    )
    chain = tuple((bucket, 1.0) for hop in hops[:-1] for bucket, _ in machine.direct(*hop))
    for order, group in enumerate(_groups(training.network)):
        gradients = tuple(_gradient(group.layer, gpu) for gpu in range(num_gpus))
        name = f"all-reduce {order}"
        yield _collective(machine, group, name, order, gradients, reduced, 2 * (num_gpus - 1))
        yield _collective(machine, group, f"broadcast {order}", order, (name,), chain, num_gpus - 1)


def _collective(
    machine: GpuMachine,
    group: _Group,
    name: str,
    order: int,
    after: tuple[str, ...],
    usage: Usage,
    num_hops: int,
) -> Task:
    """Over the links of `usage`; without one, in the memory of GPU 0."""
    return Task(
        name=name,
        after=after,
        queue="nccl",
        order=order,
        overhead_s=machine.dispatch_s + group.num_arrays * num_hops * machine.hop_s,
        nbytes=group.nbytes if usage else NS_PER_S * machine.move_s(group.nbytes),
        usage=usage or machine.computing(0),
    )

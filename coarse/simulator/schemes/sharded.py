"""Schemes that shard what others keep whole: a parameter server on the memory devices, and FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from coarse.simulator.collectives import Collective, half_ring
from coarse.simulator.events.fair_sharing import Usage
from coarse.simulator.events.tasks import Task
from coarse.simulator.job import GradientBucket, Job, gradient_buckets
from coarse.simulator.machines.network import Network, Transfer, largest_latency_s, usage_of, worker_copies
from coarse.simulator.schemes.step import MemoryUse, Step


def parameter_server_step(job: Job) -> Step:
    """Every gradient bucket is cut into one part for each memory device, which updates it and returns parameters.

    Workers push and pull the parts of a bucket at once.
    """
    network = job.network
    ways = {worker: _to_all_devices(network, worker) for worker in network.workers}
    tasks = [
        task
        for number, bucket in enumerate(gradient_buckets(job))
        for task in _served(job, number, bucket, ways)
    ]
    nbytes = job.trace.nbytes
    return Step(
        network=network,
        tasks=tuple(tasks),
        memory=MemoryUse(
            worker_bytes=2 * nbytes, device_bytes=nbytes * (2 + job.num_states) / network.num_devices
        ),
        decisions=(f"{network.num_devices} servers",),
    )


Way = tuple[Usage, float]  # per byte, and the latency in seconds


def _served(
    job: Job, number: int, bucket: GradientBucket, ways: Mapping[int, tuple[Way, Way]]
) -> Iterator[Task]:
    overhead_s = job.network.num_devices * job.overhead_s
    pushes = [
        Task(
            name=f"push {number} w{worker}",
            ready_s=bucket.ready_s * job.disturbances.compute_factor(worker),
            queue=f"push w{worker}",
            order=number,
            overhead_s=overhead_s,
            nbytes=bucket.nbytes,
            usage=usage,
            latency_s=latency_s,
        )
        for worker, ((usage, latency_s), _) in ways.items()
    ]
    yield from pushes
    for worker, (_, (usage, latency_s)) in ways.items():
        yield Task(
            name=f"pull {number} w{worker}",
            after=tuple(task.name for task in pushes),
            queue=f"pull w{worker}",
            order=number,
            overhead_s=overhead_s,
            nbytes=bucket.nbytes,
            usage=usage,
            latency_s=latency_s,
        )


def _to_all_devices(network: Network, worker: int) -> tuple[Way, Way]:
    """A worker's pushes to all memory devices, and its pulls from them."""
    pushes = [(worker, network.num_workers + device) for device in range(network.num_devices)]
    return _way(network, pushes), _way(network, [pair[::-1] for pair in pushes])


def _way(network: Network, pairs: Sequence[tuple[int, int]]) -> Way:
    share, copies = 1 / network.num_devices, worker_copies(network)
    transfers = [Transfer(*pair, nbytes=share, copies=copies) for pair in pairs]
    return usage_of(network, transfers), largest_latency_s(network, pairs)


def fsdp_step(job: Job) -> Step:
    """Parameters, gradients and states are sharded over the workers; units are the gradient buckets.

    Each unit's parameters are gathered before its forward pass and again before its backward pass, one unit ahead of
    the computation; its gradients are reduced and scattered after it. One stream carries all collectives.
    """
    nbytes = [bucket.nbytes for bucket in gradient_buckets(job)]
    unit_bytes, states = max(nbytes), 2 + job.num_states
    shard_bytes = job.trace.nbytes * states / job.network.num_workers
    return Step(
        network=job.network,
        tasks=tuple(_fsdp_tasks(job)),
        memory=MemoryUse(worker_bytes=shard_bytes + 3 * unit_bytes, device_bytes=0),
        decisions=(f"{len(nbytes)} units of at least {job.bucket_bytes} bytes",),
    )


def _fsdp_tasks(job: Job) -> Iterator[Task]:
    way, buckets = half_ring(job.network), gradient_buckets(job)
    passes = list(_passes(job, buckets))
    for place, (phase, unit, seconds) in enumerate(passes):
        nbytes = buckets[unit].nbytes
        before = [f"{name} {other}" for name, other, _ in passes[:place][-2:]]
        ahead = tuple(before[:1]) if place > 1 else ()
        yield _collective(job, f"gather {phase} {unit}", way, nbytes, place, ahead)
        yield Task(
            name=f"{phase} {unit}",
            after=(f"gather {phase} {unit}", *before[-1:]),
            order=place,
            overhead_s=seconds * job.slowest,
        )
        if phase == _BACKWARD:
            yield _collective(job, f"scatter {unit}", way, nbytes, place, (f"{phase} {unit}",))


_FORWARD, _BACKWARD = "forward", "backward"


def _passes(job: Job, units: Sequence[GradientBucket]) -> Iterator[tuple[str, int, float]]:
    """Pass, unit and seconds of each computation in turn; forward runs from the last unit of backward to the first.

    A unit takes the same share of both passes.
    """
    trace = job.trace
    ends = [(unit.ready_s - trace.forward_s) / trace.backward_s for unit in units[:-1]]
    shares = [max(0.0, end - start) for start, end in pairwise([0.0, *ends, 1.0])]
    for unit in reversed(range(len(units))):
        yield _FORWARD, unit, trace.forward_s * shares[unit]
    for unit in range(len(units)):
        yield _BACKWARD, unit, trace.backward_s * shares[unit]


def _collective(
    job: Job, name: str, way: Collective, nbytes: int, order: int, after: tuple[str, ...]
) -> Task:
    return Task(
        name=name,
        after=after,
        queue="collectives",
        order=order,
        overhead_s=way.latency_s + way.num_messages * job.overhead_s,
        nbytes=nbytes if way.usage else 0,
        usage=way.usage,
    )

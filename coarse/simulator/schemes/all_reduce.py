"""All-reduce among the workers, in gradient buckets one after the other, as torch DDP over NCCL does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from coarse.simulator.collectives import Collective, double_tree, hierarchical, ring, ring_both_ways
from coarse.simulator.events.tasks import Task
from coarse.simulator.job import GradientBucket, Job, gradient_buckets
from coarse.simulator.machines.network import Network
from coarse.simulator.schemes.step import MemoryUse, Step

RING, BOTH_WAYS, TREE, HIERARCHICAL = "ring", "ring both ways", "double tree", "hierarchical"
WAYS = (RING, BOTH_WAYS, TREE, HIERARCHICAL)


def all_reduce_step(job: Job, *, ways: Sequence[str] = WAYS) -> Step:
    """A step in which each bucket takes the fastest of `ways` on idle links.

    Trees load equal links unequally, so no link is folded.

    Raises:
        ValueError: If only a hierarchical way is allowed, and the network has no groups.
    """
    network = job.network.unfolded()
    known = _stages_of(network, ways)
    tasks: list[Task] = []
    counts = dict.fromkeys(known, 0)
    for number, bucket in enumerate(gradient_buckets(job)):
        way = min(known, key=lambda name: _alone_s(known[name], network, bucket, job))
        counts[way] += 1
        tasks += _tasks(number, bucket, known[way], job)
    chosen = ", ".join(f"{count} by {way}" for way, count in counts.items() if count)
    nbytes = job.trace.nbytes * (2 + job.num_states)
    return Step(
        network=network,
        tasks=tuple(tasks),
        memory=MemoryUse(worker_bytes=nbytes, device_bytes=0),
        decisions=(f"buckets of at least {job.bucket_bytes} bytes: {chosen}",),
    )


_BUILDERS: Mapping[str, Callable[[Network], tuple[Collective, ...]]] = MappingProxyType(
    {
        RING: lambda network: (ring(network),),
        BOTH_WAYS: lambda network: (ring_both_ways(network),),
        TREE: lambda network: (double_tree(network),),
        HIERARCHICAL: lambda network: tuple(hierarchical(network)),
    }
)


def _stages_of(network: Network, ways: Sequence[str]) -> Mapping[str, tuple[Collective, ...]]:
    """The stages of each way that the network allows."""
    known: dict[str, tuple[Collective, ...]] = {}
    for way in ways:
        try:
            known[way] = _BUILDERS[way](network)
        except ValueError:
            if len(ways) == 1:
                raise
    return known


def _alone_s(stages: Sequence[Collective], network: Network, bucket: GradientBucket, job: Job) -> float:
    return sum(stage.alone_s(network, bucket.nbytes, job.overhead_s) for stage in stages)


def _tasks(number: int, bucket: GradientBucket, stages: Sequence[Collective], job: Job) -> list[Task]:
    """One task per stage. A collective holds its stream for its latencies too, as one kernel does."""
    return [
        Task(
            name=f"bucket {number} stage {stage}",
            after=(f"bucket {number} stage {stage - 1}",) if stage else (),
            ready_s=bucket.ready_s * job.slowest,
            queue=f"collectives {stage}" if len(stages) > 1 else "collectives",
            order=number,
            overhead_s=each.latency_s + each.num_messages * job.overhead_s,
            nbytes=bucket.nbytes if each.usage else 0,
            usage=each.usage,
        )
        for stage, each in enumerate(stages)
    ]

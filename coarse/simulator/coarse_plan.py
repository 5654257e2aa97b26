"""The runtime's own plan for a simulated job: routes, shards, and the split between memory devices and workers."""

from __future__ import annotations

from dataclasses import dataclass

from coarse.machine.links import Bucket, LinkTable, Path
from coarse.profiler.direct_allreduce import Collectives, choose_collective, widest_collective
from coarse.profiler.dual_sync import AUTO, DualSyncInputs, SyncCosts, plan_dual_sync
from coarse.profiler.link_plan import plan_links
from coarse.profiler.linked import collectives_from_links, profile_from_links, sync_costs_from_links
from coarse.profiler.partition import plan_partition
from coarse.profiler.routing import RoutingTable, route_shards
from coarse.schema import ITEM_BYTES
from coarse.settings import Settings
from coarse.simulator.collectives import DIRECT_ALLREDUCES, add_usages
from coarse.simulator.events.fair_sharing import Usage
from coarse.simulator.job import Job
from coarse.simulator.machines.network import LinkNetwork, Network, Route

_BYTES_PER_S = 1e9  # for one GB/s
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard to synchronise.

    Args:
        nbytes: Its bytes.
        dtype: Its dtype.
        ready_s: When an undisturbed worker has its gradient ready, in seconds of the step.
        proxies: The endpoint of the memory device to which each worker pushes it, by worker; all workers.
    """

    nbytes: int
    dtype: str
    ready_s: float
    proxies: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarsePlan:
    """Decisions of the runtime's planners.

    Args:
        shards: In the order of readiness.
        tables: The routing table of each worker; of worker 0 alone if all are alike.
        shard_bytes: S'.
    """

    shards: tuple[Shard, ...]
    tables: tuple[RoutingTable, ...]
    shard_bytes: int


def plan_job(job: Job, *, algorithm: str = "exchange") -> CoarsePlan:
    """Routes and shards, as a session on emulated links plans them.

    Args:
        job: The job.
        algorithm: Synchronisation between memory devices; "ring" keeps all routes local.
    """
    network, settings = job.network, Settings(algorithm="ring" if algorithm == "ring" else "auto")
    links = network if isinstance(network, LinkNetwork) else _alone(network)
    profile = profile_from_links(links.links, links.local_devices)
    plan = plan_links(
        profile, "simulated", local_devices=links.local_devices, settings=settings, links=links.links
    )
    specs = job.trace.specs()
    partition = plan_partition(
        specs, shard_bytes=plan.shard_bytes, gather_bytes=settings.gather_bytes, algorithm="exchange"
    )
    if links is network:
        routes = [route_shards(table, partition, specs) for table in plan.tables]
        proxies = [
            tuple(network.num_workers + device for device in devices) for devices in zip(*routes, strict=True)
        ]
    else:
        local = tuple(network.local_device(worker) for worker in range(network.num_workers))
        proxies = [local] * len(partition.shards)
    shards = [
        Shard(
            nbytes=shard.num_elements * ITEM_BYTES[specs[shard.tensor].dtype],
            dtype=specs[shard.tensor].dtype,
            ready_s=job.ready_s(shard.tensor),
            proxies=each,
        )
        for shard, each in zip(partition.shards, proxies, strict=True)
    ]
    return CoarsePlan(shards=tuple(shards), tables=plan.tables, shard_bytes=plan.shard_bytes)


def direct_allreduce_shards(
    job: Job, plan: CoarsePlan, device_usage: Usage, *, mode: str | int = AUTO
) -> dict[int, str]:
    """The shards that the workers reduce themselves, by the runtime's planner, each with its way.

    Args:
        job: The job.
        plan: Its routes and shards.
        device_usage: Bytes in each bucket per byte that goes through the memory devices.
        mode: "auto", "off" or the bytes for the memory devices.
    """
    inputs = DualSyncInputs(
        tensor_bytes=tuple(shard.nbytes for shard in plan.shards),
        forward_s=job.trace.forward_s,
        backward_s=job.trace.backward_s,
        costs=_sync_costs(job.network, plan, device_usage),
        ready_s=tuple(shard.ready_s - job.trace.forward_s for shard in plan.shards),
    )
    offloaded = plan_dual_sync(inputs, mode=mode).offloaded
    collectives = collectives_of(job.network)
    return {
        number: choose_collective(collectives, shard.nbytes)
        for number, shard in enumerate(plan.shards)
        if number not in offloaded
    }


def collectives_of(network: Network) -> Collectives:
    """Latency and bandwidth of each way of direct all-reduce."""
    if isinstance(network, LinkNetwork):
        return collectives_from_links(network.links)
    return {name: build(network).model(network) for name, build in DIRECT_ALLREDUCES.items()}


def _sync_costs(network: Network, plan: CoarsePlan, device_usage: Usage) -> SyncCosts:
    if isinstance(network, LinkNetwork):
        return sync_costs_from_links(network.links, plan.tables)
    widest = DIRECT_ALLREDUCES[widest_collective(collectives_of(network))](network)
    proxy, worker = _seconds(network, device_usage), _seconds(network, widest.usage)
    return SyncCosts(
        proxy_s_per_byte=max(proxy.values(), default=0.0),
        worker_s_per_byte=max(worker.values(), default=0.0),
        shared=tuple((proxy[bucket], worker[bucket]) for bucket in sorted(proxy.keys() & worker.keys())),
    )


def _seconds(network: Network, usage: Usage) -> dict[str, float]:
    """Seconds of each bucket for one byte."""
    capacities = network.capacities
    return {
        bucket: weight / capacities[bucket] for bucket, weight in add_usages([usage]) if bucket in capacities
    }


def _alone(network: Network) -> LinkNetwork:
    """Worker 0 and its memory device without the others: the links from which equal workers plan alike."""
    device = network.local_device(0)
    push, pull = network.route(0, device), network.route(device, 0)
    names = tuple(dict.fromkeys((*push.buckets, *pull.buckets)))
    buckets = tuple(Bucket(name=name, gbytes_per_s=network.capacities[name] / _BYTES_PER_S) for name in names)

    def path(route: Route) -> Path:
        return Path(
            latency_us=route.latency_s * _US_PER_S,
            buckets=tuple(dict.fromkeys(names.index(name) for name in route.buckets)),
        )

    links = LinkTable(
        machine=network.machine,
        num_workers=1,
        num_devices=1,
        buckets=buckets,
        paths=((None, path(push)), (path(pull), None)),
    )
    return LinkNetwork(links=links, local_devices=(0,))

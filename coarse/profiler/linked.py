"""Profiles and costs computed from a machine's links: *simulated* values of an idle machine with that wiring.

Pure functions of a link table, for planning without the machine and as the reference for paced links.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations

from coarse import __version__
from coarse.machine.links import LinkTable, Path
from coarse.profiler.alpha_beta import AlphaBeta
from coarse.profiler.curve import Curve, CurvePoint
from coarse.profiler.direct_allreduce import (
    ALL_GATHER,
    ALL_TO_ALL,
    AUTO,
    RING,
    TREE,
    TWO_WAY_RING,
    Collectives,
    widest_collective,
)
from coarse.profiler.dual_sync import SyncCosts, ring_factor
from coarse.profiler.profile import (
    BOTH,
    DEVICES,
    PULL,
    SIMULATED,
    WORKERS,
    PathId,
    Profile,
    ProfileKey,
)
from coarse.profiler.routing import RoutingTable

DEFAULT_SIZES = tuple(4096 << power for power in range(15))
"""4 KiB to 64 MiB."""

_BYTES_PER_US = 1e3  # for one GB/s
_US_PER_S = 1e6

Traffic = dict[int, float]
"""Bytes through each bucket, by its position."""


def profile_from_links(
    links: LinkTable, local_devices: Sequence[int], sizes: Sequence[int] = DEFAULT_SIZES
) -> Profile:
    """The profile that a profiler would measure on idle links.

    Both directions at once add up in shared buckets, such as the limit of a duplex link.

    Args:
        links: The machine's links.
        local_devices: The memory device that shares a switch with each worker, by worker.
        sizes: Sizes in bytes, each at least 1.

    Raises:
        ValueError: If the number of local devices is not that of the workers, or `sizes` is empty.
    """
    if len(local_devices) != links.num_workers:
        raise ValueError(f"{len(local_devices)} local devices for {links.num_workers} workers")
    key = ProfileKey(
        machine=links.machine,
        host="",
        local_devices=tuple(local_devices),
        num_devices=links.num_devices,
        versions={"coarse": __version__},
    )
    return Profile(
        kind=SIMULATED,
        key=key,
        time_budget_s=0.0,
        paths_share_links=paths_share_links(links, local_devices),
        curves={path: _curve(links, _transfers(links, path), sizes) for path in key.paths()},
    )


def sync_costs_from_links(
    links: LinkTable, tables: Sequence[RoutingTable], *, allreduce_algorithm: str = AUTO
) -> SyncCosts:
    """Seconds per byte by either way, with the resulting load on all links.

    Pairs that are measured alone do not show which of them share a link; a link table does. Each bucket carries the
    bytes of all transfers through it: pushes and pulls of every worker, the exchange between the memory devices, and
    direct all-reduce. The slowest bucket limits the speed.

    Args:
        links: The machine's links.
        tables: The routing table of each worker.
        allreduce_algorithm: Algorithm of direct all-reduce for large shards: "auto" for the fastest one.
    """
    proxy = _devices_traffic(links, tables)
    worker = _workers_traffic(links, widest_collective(collectives_from_links(links), allreduce_algorithm))

    def seconds(bucket: int, traffic: Traffic) -> float:
        return _us_per_byte(links, bucket, traffic) / _US_PER_S

    both = sorted(set(proxy) & set(worker))
    return SyncCosts(
        proxy_s_per_byte=max((seconds(bucket, proxy) for bucket in proxy), default=0.0),
        worker_s_per_byte=max((seconds(bucket, worker) for bucket in worker), default=0.0),
        shared=tuple((seconds(bucket, proxy), seconds(bucket, worker)) for bucket in both),
    )


MOST_TURNS = 16
"""Finest division of large shards between proxies, in sixteenths: a step has hundreds of shards."""

_LEAST_GAIN = 0.05


def spread_over_links(links: LinkTable, tables: Sequence[RoutingTable]) -> tuple[RoutingTable, ...]:
    """Alternates large shards between both proxies of each table, if all links together then carry more.

    The paper sends them all to BwProxy, and leaves the link to LatProxy idle at that time.

    Args:
        links: The machine's links.
        tables: The routing table of each worker.

    Returns:
        Tables with the turns that give the least time per byte; the given tables if that saves less than 5 %.
    """
    best, best_s = tuple(tables), (1 - _LEAST_GAIN) * _slowest_bucket_s(links, tables)
    for num_near in range(1, MOST_TURNS):
        spread = tuple(_with_turns(table, MOST_TURNS, num_near) for table in tables)
        cost_s = _slowest_bucket_s(links, spread)
        if cost_s < best_s:
            best, best_s = spread, cost_s
    return best


def _slowest_bucket_s(links: LinkTable, tables: Sequence[RoutingTable]) -> float:
    traffic = _devices_traffic(links, tables)
    return max((_us_per_byte(links, bucket, traffic) / _US_PER_S for bucket in traffic), default=0.0)


def _with_turns(table: RoutingTable, num_turns: int, num_near: int) -> RoutingTable:
    """LatProxy takes `num_near` of `num_turns` turns, evenly distributed among those of BwProxy."""
    if table.lat_proxy == table.bw_proxy:
        return table
    takes_near = [
        (turn + 1) * num_near // num_turns > turn * num_near // num_turns for turn in range(num_turns)
    ]
    turns = tuple(table.lat_proxy if is_near else table.bw_proxy for is_near in takes_near)
    why = (
        f"md{table.lat_proxy} takes {num_near} of {num_turns} large shards: this raises the total bandwidth of "
        "all links"
    )
    return replace(table, turns=turns, reasons=(*table.reasons, why))


def collectives_from_links(links: LinkTable) -> Collectives:
    """The time of an all-reduce among the workers by its bytes, for each way, on otherwise idle links.

    If pairs of workers share links, all-gather and all-to-all are slower than single measured pairs suggest.
    """
    latencies_us = {
        name: max((links.path(*pair).latency_us for pair in pairs), default=0.0)
        for name, pairs in (
            (RING, _neighbours(links)),
            (ALL_TO_ALL, _pairs(links)),
            (TWO_WAY_RING, _both_ways(_neighbours(links))),
            (TREE, _both_ways(_tree_edges(links.num_workers))),
        )
    }
    alpha_us = {
        RING: 2 * (links.num_workers - 1) * latencies_us[RING],
        ALL_GATHER: latencies_us[ALL_TO_ALL],
        ALL_TO_ALL: 2 * latencies_us[ALL_TO_ALL],
        TWO_WAY_RING: 2 * (links.num_workers - 1) * latencies_us[TWO_WAY_RING],
        TREE: 2 * _tree_height(links.num_workers) * latencies_us[TREE],
    }
    return {
        name: AlphaBeta(alpha_us=alpha, beta_gbytes_per_s=_gbytes_per_s(links, _workers_traffic(links, name)))
        for name, alpha in alpha_us.items()
    }


def _transfers(links: LinkTable, path: PathId) -> tuple[Path, ...]:
    if path.kind == WORKERS:
        return (links.path(links.worker(path.source), links.worker(path.target)),)
    if path.kind == DEVICES:
        return (links.path(links.device(path.source), links.device(path.target)),)
    worker, device = links.worker(path.source), links.device(path.target)
    push, pull = links.path(worker, device), links.path(device, worker)
    if path.kind == BOTH:
        return push, pull
    return (pull,) if path.kind == PULL else (push,)


def _curve(links: LinkTable, transfers: Sequence[Path], sizes: Sequence[int]) -> Curve:
    """Time until all of `transfers`, of the same size, have arrived."""
    latency_us = max(path.latency_us for path in transfers)
    traffic = Counter(bucket for path in transfers for bucket in path.buckets)
    us_per_byte = max(
        count / (links.buckets[bucket].gbytes_per_s * _BYTES_PER_US) for bucket, count in traffic.items()
    )
    return Curve(
        points=tuple(CurvePoint(nbytes=size, time_us=latency_us + size * us_per_byte) for size in sizes)
    )


def _devices_traffic(links: LinkTable, tables: Sequence[RoutingTable]) -> Traffic:
    """Traffic for each byte of a tensor that goes to the memory devices (docs/design/queue-protocol.md).

    Every worker pushes and pulls the byte, and devices exchange it. A device with k of the p clients reduces k/p of a
    tensor: it fetches that part of each contribution from its place, and sends the results to every other device with
    clients.
    """
    traffic: Traffic = {}
    rounds = [table.turns or (table.bw_proxy,) for table in tables]
    length = math.lcm(*map(len, rounds))
    for turn in range(length):
        _add_turn(traffic, links, [proxies[turn % len(proxies)] for proxies in rounds], 1 / length)
    return traffic


def _add_turn(traffic: Traffic, links: LinkTable, proxies: Sequence[int], share: float) -> None:
    """Adds the traffic of a part of a tensor that all workers push to their `proxies`, given by worker."""
    num_clients = Counter(proxies)
    for source, target in permutations(num_clients, 2):
        exchanged = share * num_clients[source] * (num_clients[target] + 1) / len(proxies)
        _add(traffic, links.path(links.device(source), links.device(target)), exchanged)
    for worker, device in enumerate(proxies):
        client, proxy = links.worker(worker), links.device(device)
        _add(traffic, links.path(client, proxy), share)
        _add(traffic, links.path(proxy, client), share)


def _workers_traffic(links: LinkTable, collective: str) -> Traffic:
    """Traffic for each byte of a tensor in direct all-reduce."""
    p = links.num_workers
    pairs, nbytes = {
        RING: (_neighbours(links), ring_factor(p)),
        ALL_GATHER: (_pairs(links), 1.0),
        ALL_TO_ALL: (_pairs(links), 2 / p),
        TWO_WAY_RING: (_both_ways(_neighbours(links)), ring_factor(p) / 2),
        TREE: (_both_ways(_tree_edges(p)), 1 / 2),
    }[collective]
    traffic: Traffic = {}
    for source, target in pairs:
        _add(traffic, links.path(source, target), nbytes)
    return traffic


def _both_ways(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*pairs, *((target, source) for source, target in pairs)]


def _tree_edges(num_workers: int) -> list[tuple[int, int]]:
    """Child and parent in both trees of a double binary tree (kernels' own path)."""
    p = num_workers
    first = [(rank, _tree_parent(rank, p)) for rank in range(1, p)]
    second = [(p - 1 - rank, p - 1 - parent) for rank, parent in first]
    if p % 2:
        second = [((rank + 1) % p, (parent + 1) % p) for rank, parent in first]
    return first + second


def _tree_parent(rank: int, num_workers: int) -> int:
    """The parent in a binary tree over all ranks in order, whose root is 0."""
    lowest_bit = rank & -rank
    parent = (rank ^ lowest_bit) | (lowest_bit << 1)
    return parent if parent < num_workers else rank ^ lowest_bit


def _tree_height(num_workers: int) -> int:
    def depth(rank: int) -> int:
        return 1 + depth(_tree_parent(rank, num_workers)) if rank else 0

    return max(map(depth, range(num_workers)))


def _neighbours(links: LinkTable) -> list[tuple[int, int]]:
    p = links.num_workers
    return [(worker, (worker + 1) % p) for worker in range(p)] if p > 1 else []


def _pairs(links: LinkTable) -> list[tuple[int, int]]:
    return list(permutations(range(links.num_workers), 2))


def _us_per_byte(links: LinkTable, bucket: int, traffic: Traffic) -> float:
    return traffic[bucket] / (links.buckets[bucket].gbytes_per_s * _BYTES_PER_US)


def _gbytes_per_s(links: LinkTable, traffic: Traffic) -> float:
    """Bandwidth of all the traffic at once: that of its slowest bucket."""
    return min(
        (links.buckets[bucket].gbytes_per_s / nbytes for bucket, nbytes in traffic.items()), default=math.inf
    )


def _add(traffic: Traffic, path: Path, nbytes: float) -> None:
    for bucket in path.buckets:
        traffic[bucket] = traffic.get(bucket, 0.0) + nbytes


def paths_share_links(links: LinkTable, local_devices: Iterable[int]) -> bool:
    """Whether a push to a local device and a transfer to the next worker share their slowest link.

    Args:
        links: The machine's links.
        local_devices: The memory device that shares a switch with each worker, by worker.
    """
    for worker, device in enumerate(local_devices):
        if links.num_workers < 2:
            return False
        push = _tightest(links, links.path(links.worker(worker), links.device(device)))
        following = links.worker((worker + 1) % links.num_workers)
        if push & _tightest(links, links.path(links.worker(worker), following)):
            return True
    return False


def _tightest(links: LinkTable, path: Path) -> set[int]:
    least = min(links.buckets[bucket].gbytes_per_s for bucket in path.buckets)
    return {bucket for bucket in path.buckets if links.buckets[bucket].gbytes_per_s == least}

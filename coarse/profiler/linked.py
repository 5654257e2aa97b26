"""Profiles and costs that follow from a machine's links: *simulated*, what an idle machine of that wiring would show.

Pure functions of a link table, for planning without the machine and as the reference of what paced links do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from coarse import __version__
from coarse.machine.links import LinkTable, Path
from coarse.profiler.curve import Curve, CurvePoint
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

_BYTES_PER_US = 1e3  # of one GB/s
_BYTES_PER_S = 1e9

Traffic = dict[int, float]
"""Bytes that pass each bucket, by its position."""


def profile_from_links(
    links: LinkTable, local_devices: Sequence[int], sizes: Sequence[int] = DEFAULT_SIZES
) -> Profile:
    """What a profiler would measure on idle links.

    Both directions at once add up in the buckets that they share, such as the limit of a duplex link.

    Args:
        links: Of the machine.
        local_devices: The memory device that each worker shares a switch with, by worker.
        sizes: In bytes, each at least 1.

    Raises:
        ValueError: If there is not one local device for each worker, or no sizes.
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


def sync_costs_from_links(links: LinkTable, tables: Sequence[RoutingTable]) -> SyncCosts:
    """Seconds per byte on either way, when all links are as busy as they then are.

    Pairs that are measured alone do not show which of them share a link; a link table does. Each bucket
    takes the bytes of all that passes it: pushes and pulls of every worker, the ring of the memory devices, the
    ring of the workers. The slowest bucket sets the pace.

    Args:
        links: Of the machine.
        tables: The routing table of each worker.
    """
    proxy = _clients_traffic(links, tables)
    for bucket, nbytes in _ring_traffic(links, [links.device(d) for d in range(links.num_devices)]).items():
        proxy[bucket] = proxy.get(bucket, 0.0) + nbytes
    worker = _ring_traffic(links, [links.worker(worker) for worker in range(links.num_workers)])

    def seconds(bucket: int, traffic: Traffic) -> float:
        return traffic[bucket] / (links.buckets[bucket].gbytes_per_s * _BYTES_PER_S)

    both = sorted(set(proxy) & set(worker))
    return SyncCosts(
        proxy_s_per_byte=max((seconds(bucket, proxy) for bucket in proxy), default=0.0),
        worker_s_per_byte=max((seconds(bucket, worker) for bucket in worker), default=0.0),
        shared=tuple((seconds(bucket, proxy), seconds(bucket, worker)) for bucket in both),
    )


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
    """Time until all of `transfers`, of equally many bytes, have arrived."""
    latency_us = max(path.latency_us for path in transfers)
    traffic = Counter(bucket for path in transfers for bucket in path.buckets)
    us_per_byte = max(
        count / (links.buckets[bucket].gbytes_per_s * _BYTES_PER_US) for bucket, count in traffic.items()
    )
    return Curve(
        points=tuple(CurvePoint(nbytes=size, time_us=latency_us + size * us_per_byte) for size in sizes)
    )


def _clients_traffic(links: LinkTable, tables: Sequence[RoutingTable]) -> Traffic:
    """Of each byte of a tensor: every worker pushes it and pulls it."""
    traffic: Traffic = {}
    for worker, table in enumerate(tables):
        client, proxy = links.worker(worker), links.device(table.bw_proxy)
        _add(traffic, links.path(client, proxy), 1.0)
        _add(traffic, links.path(proxy, client), 1.0)
    return traffic


def _ring_traffic(links: LinkTable, members: Sequence[int]) -> Traffic:
    """Of each byte of a tensor that the members reduce in a ring."""
    traffic: Traffic = {}
    if len(members) > 1:
        for member, following in zip(members, [*members[1:], members[0]], strict=True):
            _add(traffic, links.path(member, following), ring_factor(len(members)))
    return traffic


def _add(traffic: Traffic, path: Path, nbytes: float) -> None:
    for bucket in path.buckets:
        traffic[bucket] = traffic.get(bucket, 0.0) + nbytes


def paths_share_links(links: LinkTable, local_devices: Iterable[int]) -> bool:
    """Whether a push to a local device and sending to the next worker have their tightest link in common.

    Args:
        links: Of the machine.
        local_devices: The memory device that each worker shares a switch with, by worker.
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

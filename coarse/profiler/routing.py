"""Selects the proxy of a shard by its size (COARSE paper, section III-E)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import TYPE_CHECKING

from coarse.profiler.switchover import measure_crossing
from coarse.schema import ITEM_BYTES

if TYPE_CHECKING:  # slow to import
    from coarse.profiler.curve import Curve
    from coarse.profiler.partition import PartitionPlan
    from coarse.profiler.profile import Profile
    from coarse.schema import TensorSpec

TIE_FRACTION = 0.05
"""Times that differ by at most this fraction count as equal: the precision of paced links and of medians."""

DEFAULT_MARGIN = 0.1
"""Least gain of a new table that justifies a change of routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """The three entries of one client's routing table. Immutable; safe to share between threads.

    Args:
        lat_proxy: Memory device for shards smaller than the threshold: the one with the lowest latency.
        bw_proxy: Memory device for the others: the one with the highest bandwidth.
        threshold_bytes: The size at which both take equally long.
        turns: The proxies that large shards of a step use in turn; () for BwProxy alone, as in the paper.
        reasons: Reasons in words; they do not count in comparisons of tables.

    Raises:
        ValueError: If a number is negative.

    Example:
        >>> table = RoutingTable(lat_proxy=0, bw_proxy=3, threshold_bytes=1 << 20)
        >>> table.route(4096), table.route(1 << 20)
        (0, 3)
    """

    lat_proxy: int
    bw_proxy: int
    threshold_bytes: int = 0
    turns: tuple[int, ...] = ()
    reasons: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if min(self.lat_proxy, self.bw_proxy, self.threshold_bytes, *self.turns) < 0:
            raise ValueError(f"a routing table holds no negative numbers: {self}")

    def route(self, nbytes: int) -> int:
        """The memory device that takes a shard of `nbytes` bytes."""
        return self.lat_proxy if nbytes < self.threshold_bytes else self.bw_proxy

    def to_one_proxy(self) -> RoutingTable:
        """The same table with BwProxy for all shards."""
        return replace(self, lat_proxy=self.bw_proxy, threshold_bytes=0)

    def __str__(self) -> str:
        where = f"md{self.bw_proxy}"
        if self.lat_proxy != self.bw_proxy:
            where = f"md{self.lat_proxy} below {self.threshold_bytes} bytes, md{self.bw_proxy} from there on"
        return "; ".join([where, *self.reasons])

    @classmethod
    def from_profiles(
        cls,
        curves: Mapping[int, Curve],
        *,
        local_proxy: int,
        load: Mapping[int, int] | None = None,
        tie_fraction: float = TIE_FRACTION,
    ) -> RoutingTable:
        """Plans one client's table.

        A pure function of its arguments: the same curves in any order give the same table on every worker.
        Proxies are compared by simultaneous push and pull, as in a pipeline of shards (Fig 9). LatProxy is the
        fastest at the smallest measured size, BwProxy at the largest one. Ties go to the local proxy, then to the one
        that fewer other clients use, then to the lower number. If BwProxy never becomes faster than LatProxy, the
        table has only one proxy.

        The local proxy is the default: its least possible times according to its spreads count, so that another proxy
        replaces it only if the repeats leave no doubt. The reasons state where this has kept it.

        Args:
            curves: Curves of both directions at once between this client and each proxy, by proxy.
            local_proxy: The proxy that shares a switch with this client.
            load: Number of other clients with each proxy as their BwProxy; 0 by default.
            tie_fraction: Times that differ by at most this fraction count as equal.

        Raises:
            ValueError: If `curves` lacks the local proxy.
        """
        if local_proxy not in curves:
            raise ValueError(f"the local proxy md{local_proxy} has no curve")
        ranking = _Ranking(curves=curves, local=local_proxy, load=load or {}, tie_fraction=tie_fraction)
        smallest, largest = _deciding_sizes(curves)
        lat_proxy, why_lat = ranking.best(smallest, "lowest latency")
        bw_proxy, why_bw = ranking.best(largest, "highest bandwidth")
        curves = {**curves, local_proxy: curves[local_proxy].at_its_least()}
        if lat_proxy == bw_proxy:
            return cls(lat_proxy=lat_proxy, bw_proxy=bw_proxy, reasons=(why_lat, why_bw, "one proxy for all"))
        threshold_bytes = measure_crossing(curves[lat_proxy], curves[bw_proxy])
        if threshold_bytes is None:
            why = f"one proxy for all: md{bw_proxy} never overtakes md{lat_proxy}"
            return cls(lat_proxy=lat_proxy, bw_proxy=lat_proxy, reasons=(why_lat, why_bw, why))
        if threshold_bytes == 0:
            why = f"one proxy for all: md{bw_proxy} is nowhere slower than md{lat_proxy}"
            return cls(lat_proxy=bw_proxy, bw_proxy=bw_proxy, reasons=(why_lat, why_bw, why))
        why = f"md{bw_proxy} stays ahead of md{lat_proxy} from {threshold_bytes} bytes on"
        return cls(
            lat_proxy=lat_proxy,
            bw_proxy=bw_proxy,
            threshold_bytes=threshold_bytes,
            reasons=(why_lat, why_bw, why),
        )


def sizes_in_doubt(curves: Mapping[int, Curve], local_proxy: int) -> tuple[int, ...]:
    """The measured sizes in bytes at which only the spread keeps a client with its local proxy.

    More repeats may resolve the doubt. A pure function; arguments are those of RoutingTable.from_profiles().
    """
    ranking = _Ranking(curves=curves, local=local_proxy, load={}, tie_fraction=TIE_FRACTION)
    sizes = sorted({point.nbytes for curve in curves.values() for point in curve.points})
    return tuple(nbytes for nbytes in sizes if ranking.is_in_doubt(nbytes))


def _deciding_sizes(curves: Mapping[int, Curve]) -> tuple[int, int]:
    """The smallest measured size, which determines LatProxy, and the largest one, which determines BwProxy."""
    return (
        min(curve.points[0].nbytes for curve in curves.values()),
        max(curve.points[-1].nbytes for curve in curves.values()),
    )


def route_shards(table: RoutingTable, plan: PartitionPlan, specs: Sequence[TensorSpec]) -> list[int]:
    """The memory device of each shard of a plan, in the order of its shards."""
    item_bytes = [ITEM_BYTES[spec.dtype] for spec in specs]
    turns = cycle(table.turns or (table.bw_proxy,))
    sizes = (shard.num_elements * item_bytes[shard.tensor] for shard in plan.shards)
    return [table.lat_proxy if nbytes < table.threshold_bytes else next(turns) for nbytes in sizes]


def plan_routing(profile: Profile) -> tuple[RoutingTable, ...]:
    """Plans the table of every worker, in the order of the workers; times within the profile's noise count as equal.

    Curves are measured one path at a time. If all workers used the lowest of several equal remote proxies, they would
    share its link, which no curve shows. Therefore each choice takes the choices of the preceding workers into
    account.
    """
    local_proxies = profile.key.local_devices
    curves = [profile.both_at_once(worker) for worker in range(len(local_proxies))]
    return plan_tables(curves, local_proxies, tie_fraction=noise_fraction(profile))


def plan_tables(
    curves: Sequence[Mapping[int, Curve]],
    local_proxies: Sequence[int],
    *,
    tie_fraction: float = TIE_FRACTION,
) -> tuple[RoutingTable, ...]:
    """Plans the table of every worker, in the order of the workers; each considers the choices of preceding workers.

    Args:
        curves: Curves of each worker, as for RoutingTable.from_profiles().
        local_proxies: The proxy that shares a switch with each worker.
        tie_fraction: As for RoutingTable.from_profiles().
    """
    tables: list[RoutingTable] = []
    load: dict[int, int] = {}
    for own, local_proxy in zip(curves, local_proxies, strict=True):
        table = RoutingTable.from_profiles(own, local_proxy=local_proxy, load=load, tie_fraction=tie_fraction)
        load[table.bw_proxy] = load.get(table.bw_proxy, 0) + 1
        tables.append(table)
    return tuple(tables)


def noise_fraction(profile: Profile) -> float:
    """The relative difference between two times of a profile that may be due to chance.

    TIE_FRACTION if links have constant times. On a host, which shares processors and memory with other programs,
    twice the largest spread of any size with both directions at once, if that is more.
    """
    from coarse.profiler.profile import MEASURED  # a client needs routes, but not numpy

    if profile.kind != MEASURED:
        return TIE_FRACTION
    spreads = [
        point.spread_us / point.time_us
        for worker in range(profile.key.num_workers)
        for curve in profile.both_at_once(worker).values()
        for point in curve.points
    ]
    return max(TIE_FRACTION, 2 * max(spreads))


def predict_time_us(table: RoutingTable, curves: Mapping[int, Curve], histogram: Mapping[int, int]) -> float:
    """The time of a client's shards one after the other.

    Args:
        table: The routes of the shards.
        curves: Curves of each proxy that the table names.
        histogram: Number of shards by size in bytes.
    """
    # fsum, so that results do not depend on the order of the histogram.
    return math.fsum(
        count * curves[table.route(nbytes)].time_us(nbytes) for nbytes, count in histogram.items()
    )


def is_better(
    new: RoutingTable,
    old: RoutingTable,
    curves: Mapping[int, Curve],
    histogram: Mapping[int, int],
    *,
    margin: float = DEFAULT_MARGIN,
) -> bool:
    """Whether a change from `old` to `new` is worthwhile: the hysteresis of dynamic profiling.

    Args:
        new, old: The tables.
        curves: The newest curves, which predict the times of both tables.
        histogram: Number of shards by size in bytes.
        margin: Fraction of the predicted time that must be saved.

    Raises:
        ValueError: If the margin is not between 0 and 1.
    """
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin} must be at least 0 and below 1")
    return predict_time_us(new, curves, histogram) < (1 - margin) * predict_time_us(old, curves, histogram)


def with_threshold(table: RoutingTable, threshold_bytes: int) -> RoutingTable:
    """The same table with the threshold that the user requests."""
    why = f"COARSE_ROUTING_THRESHOLD_BYTES={threshold_bytes}"
    return replace(table, threshold_bytes=threshold_bytes, reasons=(*table.reasons, why))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranking:
    """Selects proxies by size, and gives reasons."""

    curves: Mapping[int, Curve]
    local: int
    load: Mapping[int, int]
    tie_fraction: float

    def best(self, nbytes: int, what: str) -> tuple[int, str]:
        times_us = {proxy: curve.time_us(nbytes) for proxy, curve in self.curves.items()}
        if self.is_in_doubt(nbytes):
            return self.local, self._why_in_doubt(nbytes, what, times_us)
        limit_us = min(times_us.values()) * (1 + self.tie_fraction)
        alike = [proxy for proxy, time_us in times_us.items() if time_us <= limit_us]
        chosen = min(alike, key=lambda proxy: (proxy != self.local, self.load.get(proxy, 0), proxy))
        place = "local" if chosen == self.local else "remote"
        why = f"md{chosen} ({place}) has the {what}: {times_us[chosen]:.1f} us for {nbytes} bytes"
        others = [time_us for proxy, time_us in times_us.items() if proxy not in alike]
        if others:
            why += f", others need {min(others):.1f} us or more"
        if len(alike) > 1:
            why += f"; equally fast are {', '.join(f'md{proxy}' for proxy in sorted(alike))}"
        return chosen, why

    def is_in_doubt(self, nbytes: int) -> bool:
        """Whether the local proxy loses by its time, but not by its least possible time according to its spread."""
        limit_us = min(curve.time_us(nbytes) for curve in self.curves.values()) * (1 + self.tie_fraction)
        local = self.curves[self.local]
        return local.time_us(nbytes) > limit_us >= local.at_its_least().time_us(nbytes)

    def _why_in_doubt(self, nbytes: int, what: str, times_us: Mapping[int, float]) -> str:
        fastest = min(times_us, key=lambda proxy: (times_us[proxy], proxy))
        least_us = self.curves[self.local].at_its_least().time_us(nbytes)
        return (
            f"md{self.local} (local) is kept, because repeats spread too widely to tell which has the {what}: "
            f"{least_us:.1f} to {times_us[self.local]:.1f} us for {nbytes} bytes, "
            f"md{fastest} {times_us[fastest]:.1f} us"
        )

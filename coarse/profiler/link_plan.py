"""Plans a session from a profile at its start: a routing table for each worker, and the shard size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coarse.profiler.routing import RoutingTable, with_threshold

if TYPE_CHECKING:  # slow to import, and only needed with a profile
    from coarse.machine.links import LinkTable
    from coarse.profiler.profile import Profile
    from coarse.settings import Settings

DEFAULT_SHARD_BYTES = 256 << 10
"""If memory devices share the host's memory: enough shards to balance sync cores, few enough for rare wake-ups.

Measured with `coarse bench sync`: docs/design/profiling.md.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """The routes and shard size of a node's workers. Immutable; the same on each worker.

    Args:
        tables: The routing table of each worker, by client number.
        shard_bytes: Partition threshold.
        decisions: The decisions and reasons, in words.
    """

    tables: tuple[RoutingTable, ...]
    shard_bytes: int
    decisions: tuple[str, ...]


def plan_links(
    profile: Profile | None,
    note: str,
    *,
    local_devices: Sequence[int],
    settings: Settings,
    links: LinkTable | None = None,
) -> LinkPlan:
    """Plans from a profile, or without one.

    A pure function of its arguments, so that workers agree without communication.

    Args:
        profile: Profile of this node; None to use only local memory devices.
        note: Source of the profile, or why none exists, in words.
        local_devices: The memory device of each worker, by client number.
        settings: The session's settings.
        links: Links of the emulated machine; None without emulation.
    """
    tables, why_tables = _tables(profile, local_devices, settings)
    if settings.routing_threshold_bytes:
        tables = tuple(with_threshold(table, settings.routing_threshold_bytes) for table in tables)
    if settings.routing == "spread" and links is not None and profile is not None:
        from coarse.profiler.linked import spread_over_links

        tables = spread_over_links(links, tables)
    shard_bytes, why_size = _shard_bytes(profile, tables, settings)
    routes = [f"w{worker}: {table}" for worker, table in enumerate(tables)]
    return LinkPlan(
        tables=tables,
        shard_bytes=shard_bytes,
        decisions=(
            f"links: {note}",
            f"routes: {why_tables}",
            *routes,
            f"shards of at least {shard_bytes} bytes: {why_size}",
        ),
    )


def _tables(
    profile: Profile | None, local_devices: Sequence[int], settings: Settings
) -> tuple[tuple[RoutingTable, ...], str]:
    if settings.routing == "local":
        return _local(local_devices), "local, because COARSE_ROUTING is"
    if profile is None:
        return _local(local_devices), "local, because no profile is available"
    if settings.algorithm in ("ring", "nccl"):
        why = f"local, because {settings.algorithm} takes each contribution from its own memory device"
        return _local(local_devices), why
    from coarse.profiler.routing import plan_routing

    if profile.is_of_this_machine and settings.routing != "profile":
        why = "local, because shards in the host's memory are not moved, whichever memory device reduces them"
        return _local(local_devices), f"{why} (COARSE_ROUTING=profile uses the profile)"
    return plan_routing(profile), f"by the {profile.kind} profile"


def _local(local_devices: Sequence[int]) -> tuple[RoutingTable, ...]:
    return tuple(RoutingTable(lat_proxy=device, bw_proxy=device) for device in local_devices)


def _shard_bytes(
    profile: Profile | None, tables: Sequence[RoutingTable], settings: Settings
) -> tuple[int, str]:
    if settings.shard_bytes:
        return settings.shard_bytes, "set by COARSE_SHARD_BYTES"
    if profile is None:
        return DEFAULT_SHARD_BYTES, "the default without a profile"
    from coarse.profiler.shard_size import plan_shard_size

    size = plan_shard_size(profile, tables)
    if not profile.is_of_this_machine:
        return size.nbytes, size.reason
    return (
        DEFAULT_SHARD_BYTES,
        "the default, because sync cores reduce host memory in place: no link needs filling, and larger "
        f"shards leave sync cores idle (copies would need {size.nbytes} bytes: {size.reason})",
    )

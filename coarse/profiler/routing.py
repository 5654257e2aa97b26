"""Which proxy takes a shard, by its size (COARSE paper, section III-E)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """The three entries of one client's routing table. Immutable; safe to share between threads.

    Args:
        lat_proxy: Memory device for shards smaller than the threshold: the one with the lowest latency.
        bw_proxy: Memory device for the others: the one with the highest bandwidth.
        threshold_bytes: Where both take equally long.

    Raises:
        ValueError: If a number is negative.
    """

    lat_proxy: int
    bw_proxy: int
    threshold_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.lat_proxy, self.bw_proxy, self.threshold_bytes) < 0:
            raise ValueError(f"a routing table holds no negative numbers: {self}")

    def route(self, nbytes: int) -> int:
        """The memory device that takes a shard of `nbytes` bytes."""
        return self.lat_proxy if nbytes < self.threshold_bytes else self.bw_proxy

"""How the workers reduce on their own path: in a ring, by all-gather or by all-to-all (docs/design/planning.md)."""

from __future__ import annotations

from collections.abc import Mapping

from coarse.profiler.alpha_beta import AlphaBeta

AUTO = "auto"
RING, ALL_GATHER, ALL_TO_ALL = "ring", "all-gather", "all-to-all"

Collectives = Mapping[str, AlphaBeta]
"""How long an all-reduce among the workers takes in each of the three ways, by its bytes."""


def choose_collective(collectives: Collectives, nbytes: int, mode: str = AUTO) -> str:
    """The way that is fastest for a shard of `nbytes`; of equals the first one. Any other mode is the way itself."""
    return mode if mode != AUTO else min(collectives, key=lambda name: collectives[name].time_us(nbytes))


def widest_collective(collectives: Collectives, mode: str = AUTO) -> str:
    """The way that is fastest for shards of any great size, then the one of the least latency.

    Any other mode is the way itself.
    """
    if mode != AUTO:
        return mode
    return min(
        collectives, key=lambda name: (-collectives[name].beta_gbytes_per_s, collectives[name].alpha_us)
    )

"""Chooses the way of direct all-reduce: a ring, trees, all-gather or all-to-all (docs/design/planning.md)."""

from __future__ import annotations

from collections.abc import Mapping

from coarse.profiler.alpha_beta import AlphaBeta

AUTO = "auto"
RING, ALL_GATHER, ALL_TO_ALL = "ring", "all-gather", "all-to-all"
TWO_WAY_RING, TREE = "two-way-ring", "tree"
WAYS = (RING, ALL_GATHER, ALL_TO_ALL, TWO_WAY_RING, TREE)

TWO_LEVEL = "two-level"
"""All-to-all within each node, and between its two iterations an exchange with the other nodes."""

WAYS_OVER_NODES = (*WAYS, TWO_LEVEL)
"""The ways among the workers of several nodes."""

Collectives = Mapping[str, AlphaBeta]
"""Time of an all-reduce among the workers by each way, by its bytes."""


def choose_collective(collectives: Collectives, nbytes: int, mode: str = AUTO) -> str:
    """The fastest way for a shard of `nbytes`; ties go to the first one. A mode other than AUTO is the way itself."""
    return mode if mode != AUTO else min(collectives, key=lambda name: collectives[name].time_us(nbytes))


def widest_collective(collectives: Collectives, mode: str = AUTO) -> str:
    """The fastest way for very large shards; ties go to the least latency.

    A mode other than AUTO is the way itself.
    """
    if mode != AUTO:
        return mode
    return min(
        collectives, key=lambda name: (-collectives[name].beta_gbytes_per_s, collectives[name].alpha_us)
    )

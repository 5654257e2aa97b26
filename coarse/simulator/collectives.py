"""Collectives among the workers as single flows: their bytes in each bucket, and their latencies.

A pipelined collective moves at the speed of its slowest link, so its transfers are one flow that crosses all their
buckets. The paper's (2(p-1)/p) n is what each worker of a ring sends for n bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from coarse.profiler.alpha_beta import AlphaBeta
from coarse.profiler.direct_allreduce import ALL_GATHER, ALL_TO_ALL, RING
from coarse.profiler.dual_sync import ring_factor
from coarse.simulator.events.fair_sharing import Usage
from coarse.simulator.machines.network import Network, Transfer, largest_latency_s, usage_of, worker_copies

_BYTES_PER_S = 1e9  # for one GB/s
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An operation of all workers.

    Args:
        usage: Bytes that cross each bucket per byte of the tensor; () for one worker.
        latency_s: Latencies of its iterations together.
        num_messages: Messages that one worker sends.
    """

    usage: Usage
    latency_s: float
    num_messages: int

    def seconds_per_byte(self, network: Network) -> float:
        """Time of a byte on idle links."""
        capacities = network.capacities
        return max((weight / capacities[bucket] for bucket, weight in self.usage), default=0.0)

    def alone_s(self, network: Network, nbytes: float, overhead_s: float = 0.0) -> float:
        """Time of `nbytes` on idle links."""
        return self.latency_s + self.num_messages * overhead_s + nbytes * self.seconds_per_byte(network)

    def model(self, network: Network) -> AlphaBeta:
        """Latency and bandwidth on idle links."""
        seconds = self.seconds_per_byte(network)
        return AlphaBeta(
            alpha_us=self.latency_s * _US_PER_S,
            beta_gbytes_per_s=1 / (seconds * _BYTES_PER_S) if seconds else math.inf,
        )


def ring(network: Network) -> Collective:
    """All-reduce in 2(p-1) iterations, each worker to the next one."""
    return _ring(network, [range(network.num_workers)], ring_factor(network.num_workers), 2)


def ring_both_ways(network: Network) -> Collective:
    """Two rings in opposite directions, each for half of the bytes."""
    one = _ring(network, [range(network.num_workers)], ring_factor(network.num_workers) / 2, 2)
    back = _ring(network, [range(network.num_workers)[::-1]], ring_factor(network.num_workers) / 2, 2)
    return Collective(
        usage=add_usages((one.usage, back.usage)),
        latency_s=max(one.latency_s, back.latency_s),
        num_messages=2 * one.num_messages,
    )


def half_ring(network: Network) -> Collective:
    """Reduce-scatter or all-gather: p-1 iterations of a ring."""
    return _ring(network, [range(network.num_workers)], ring_factor(network.num_workers) / 2, 1)


def all_gather_reduce(network: Network) -> Collective:
    """All-reduce in one iteration: each worker sends the whole tensor to every other one."""
    return _all_pairs(network, share=1.0, num_iterations=1)


def all_to_all_reduce(network: Network) -> Collective:
    """All-reduce in two iterations: each worker sends a p-th to every other one."""
    return _all_pairs(network, share=2 / network.num_workers, num_iterations=2)


DIRECT_ALLREDUCES = {RING: ring, ALL_GATHER: all_gather_reduce, ALL_TO_ALL: all_to_all_reduce}
"""The ways of direct all-reduce (coarse.profiler.direct_allreduce)."""


def double_tree(network: Network) -> Collective:
    """All-reduce over two binary trees, each for half of the bytes; a worker is a leaf of at least one of them.

    The second tree is the first with all ranks moved by one (odd numbers) or mirrored (even numbers). Halves go up
    and down at once, in a pipeline.
    """
    p = network.num_workers
    edges = list(_tree_edges(p))
    other = [(_partner(one, p), _partner(two, p)) for one, two in edges]
    pairs = [pair for edge in (*edges, *other) for pair in (edge, edge[::-1])]
    return Collective(
        usage=usage_of(network, (Transfer(*pair, nbytes=0.5) for pair in pairs)),
        latency_s=2 * math.ceil(math.log2(p + 1)) * largest_latency_s(network, pairs) if pairs else 0.0,
        num_messages=6 if p > 1 else 0,
    )


def hierarchical(network: Network) -> Sequence[Collective]:
    """All-reduce in three stages: reduce-scatter in each group, all-reduce between groups, all-gather in each group.

    Raises:
        ValueError: If the network has no groups of equal size with several workers each.
    """
    groups = network.groups
    size = len(groups[0])
    if len(groups) < 2 or size < 2 or any(len(group) != size for group in groups):
        raise ValueError(
            f"{network.machine}: workers form {len(groups)} groups, the first of {size}; a hierarchical all-reduce "
            "needs several groups of equal size"
        )
    within = _ring(network, groups, ring_factor(size) / 2, 1)
    across = [[group[place] for group in groups] for place in range(size)]
    between = _ring(network, across, ring_factor(len(groups)) / size, 2)
    return (within, between, within)


def add_usages(usages: Iterable[Usage]) -> Usage:
    """The sum of several usages."""
    total: dict[str, float] = {}
    for usage in usages:
        for bucket, weight in usage:
            total[bucket] = total.get(bucket, 0.0) + weight
    return tuple(sorted(total.items()))


def _ring(network: Network, rings: Sequence[Sequence[int]], share: float, num_rounds: int) -> Collective:
    """Rings at once, each of which passes `share` bytes over each of its links in `num_rounds` rounds."""
    pairs = [pair for members in rings for pair in _neighbours(members)]
    num_iterations = num_rounds * (len(rings[0]) - 1)
    return Collective(
        usage=usage_of(network, (Transfer(*pair, nbytes=share) for pair in pairs)),
        latency_s=num_iterations * largest_latency_s(network, pairs),
        num_messages=num_iterations,
    )


def _neighbours(members: Sequence[int]) -> Iterator[tuple[int, int]]:
    if len(members) > 1:
        yield from ((member, members[(place + 1) % len(members)]) for place, member in enumerate(members))


def _all_pairs(network: Network, *, share: float, num_iterations: int) -> Collective:
    copies = worker_copies(network)
    pairs = [
        (worker, other)
        for worker in network.workers
        for other in range(network.num_workers)
        if worker != other
    ]
    return Collective(
        usage=usage_of(network, (Transfer(*pair, nbytes=share, copies=copies) for pair in pairs)),
        latency_s=num_iterations * largest_latency_s(network, pairs),
        num_messages=num_iterations * (network.num_workers - 1),
    )


def _tree_edges(num: int) -> Iterator[tuple[int, int]]:
    """Edges (child, parent) of a binary tree whose leaves are the odd ranks.

    A rank's parent is at the distance of its lowest bit: odd multiples of it lie below the next higher power.
    """
    for rank in range(1, num):
        bit = rank & -rank
        parent = (rank ^ bit) | (bit << 1)
        yield rank, parent if parent < num else rank ^ bit


def _partner(rank: int, num: int) -> int:
    return (rank + 1) % num if num % 2 else num - 1 - rank

"""The size of shards: small enough to pipeline, large enough to fill a link (COARSE paper, section III-E)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coarse.profiler.curve import Curve

if TYPE_CHECKING:
    from coarse.profiler.profile import Profile
    from coarse.profiler.routing import RoutingTable

FULL_FRACTION = 0.9
"""Fraction of the highest bandwidth that counts as full.

On a path of latency alpha and bandwidth beta, the fraction f is reached at f/(1-f) * alpha * beta: 4, 9, 19 and 99
times alpha * beta for 0.8, 0.9, 0.95 and 0.99. A higher fraction gains at most 1 - f of throughput. It also extends
the pipeline's ends, in which one direction is idle, in proportion to the shard. docs/design/planning.md has the
figures for the paper's machines.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSize:
    """The paper's S': the smallest measured size that reaches full bandwidth.

    Args:
        nbytes: S', in bytes.
        gbytes_per_s: Bandwidth at S', each way.
        peak_gbytes_per_s: The highest bandwidth at any measured size.
        full_fraction: Fraction of the peak that counts as full.
        reason: The reason in words.
    """

    nbytes: int
    gbytes_per_s: float
    peak_gbytes_per_s: float
    full_fraction: float
    reason: str


def choose_shard_size(curve: Curve, *, full_fraction: float = FULL_FRACTION) -> ShardSize:
    """Chooses S' from the curve of a client and its BwProxy, both directions at once.

    Raises:
        ValueError: If the fraction is not above 0 and at most 1.
    """
    if not 0 < full_fraction <= 1:
        raise ValueError(f"full_fraction={full_fraction} must be above 0 and at most 1")
    peak = curve.peak_gbytes_per_s
    chosen = next(point for point in curve.points if point.gbytes_per_s >= full_fraction * peak)
    return ShardSize(
        nbytes=chosen.nbytes,
        gbytes_per_s=chosen.gbytes_per_s,
        peak_gbytes_per_s=peak,
        full_fraction=full_fraction,
        reason=(
            f"smallest tested size that reaches {full_fraction:.0%} of the highest bandwidth: "
            f"{chosen.gbytes_per_s:.3g} of {peak:.3g} GB/s each way"
        ),
    )


def common_shard_size(curves: Sequence[Curve]) -> ShardSize:
    """Chooses one S' for several workers: the largest that any of them needs, the first one's if several need it.

    Args:
        curves: The curve of each worker and its BwProxy, both directions at once; at least one.
    """
    return max(map(choose_shard_size, curves), key=lambda size: size.nbytes)


def plan_shard_size(profile: Profile, tables: Sequence[RoutingTable]) -> ShardSize:
    """Chooses the common S' of all workers of a job.

    Args:
        profile: Profile of the machine.
        tables: The routing table of each worker, whose BwProxy counts.
    """
    return common_shard_size(
        [profile.both_at_once(worker)[table.bw_proxy] for worker, table in enumerate(tables)]
    )

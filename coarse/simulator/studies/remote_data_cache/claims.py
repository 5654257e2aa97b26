"""The document's statements without a number of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from coarse.simulator.studies.remote_data_cache import kernel_boundary as boundary
from coarse.simulator.studies.remote_data_cache.parameters import Machine
from coarse.simulator.studies.remote_data_cache.results import LINKS_GBYTES_PER_S, Results
from coarse.simulator.studies.remote_data_cache.systems import (
    HARDWARE,
    IDEAL,
    MIGRATION,
    NO_COHERENCE,
    NUMA,
    REPLICATION,
    SIZES_GIB,
    SOFTWARE,
    WRITES_BACK,
    sized,
)
from coarse.simulator.studies.study import Claim

_NEAR = 0.06
"""CARVE is within this of the ideal (abstract)."""


def all_claims(results: Results) -> Iterator[Claim]:
    """In the order of the document."""
    yield from _sharing(results)
    yield from _coherence(results)
    yield from _sensitivity(results)


def _sharing(results: Results) -> Iterator[Claim]:
    shares = {name: each.remote_shares[NUMA] for name, each in results.by_name.items()}
    yield Claim(
        what="XSBench and Lulesh have more than 70% remote accesses on NUMA-GPU",
        source="Fig 8",
        holds=min(shares["XSBench"], shares["Lulesh"]) > 0.7,
        found=f"{shares['XSBench']:.0%} and {shares['Lulesh']:.0%}",
    )
    slowdowns = [1 - slow for name in shares if (slow := results.relative(name, NUMA)) < 0.95]
    yield Claim(
        what="NUMA-GPU slows the workloads that it does not serve well down by 20 to 80%",
        source="Fig 2",
        holds=min(slowdowns) >= 0.15 and max(slowdowns) <= 0.85,
        found=f"{min(slowdowns):.0%} to {max(slowdowns):.0%}",
        reason="" if min(slowdowns) >= 0.15 else "MCB, of which half hits the LLC, is slowed down least",
    )
    pages = results.mean([each.pages.read_write_share for each in results.by_name.values()])
    lines = results.mean([each.lines.read_write_share for each in results.by_name.values()])
    yield Claim(
        what="By lines, far fewer accesses go to what is shared and written than by pages",
        source="Fig 4",
        holds=lines < pages / 2,
        found=f"{lines:.0%} by lines, {pages:.0%} by pages",
    )
    speeds = [results.speedup(system) for system in (NUMA, REPLICATION, HARDWARE, IDEAL)]
    yield Claim(
        what="Replication is better than NUMA-GPU, CARVE than replication, and the ideal than all",
        source="Fig 13",
        holds=speeds == sorted(speeds),
        found=", ".join(f"{speed:.2f}" for speed in speeds),
    )
    moved = results.speedup(MIGRATION)
    yield Claim(
        what="Page migration fails where GPUs share pages",
        source="abstract",
        holds=moved < 1.05 * speeds[0],
        found=f"{moved:.2f} with migration, {speeds[0]:.2f} without",
    )


def _coherence(results: Results) -> Iterator[Claim]:
    none, hardware, software, numa = (
        results.speedup(system) for system in (NO_COHERENCE, HARDWARE, SOFTWARE, NUMA)
    )
    yield Claim(
        what="Hardware coherence is about as good as no coherence",
        source="Fig 11",
        holds=hardware > 0.95 * none,
        found=f"{hardware:.2f} and {none:.2f}",
    )
    kept = _part_kept(software, numa, none)
    yield Claim(
        what="Software coherence loses most of what the cache brings",
        source="Fig 11",
        holds=kept < 0.25,
        found=f"{software:.2f}: it keeps {kept:.0%} of the gain over NUMA-GPU",
    )
    speeds = results.by_name["XSBench"].speedups
    kept_xsbench = _part_kept(speeds[SOFTWARE], speeds[NUMA], speeds[NO_COHERENCE])
    yield Claim(
        what="XSBench, whose kernel reads the same lines again and again, is about as fast with software coherence",
        source="Fig 11",
        holds=kept_xsbench > 0.75,
        found=f"{speeds[SOFTWARE]:.2f} of {speeds[NO_COHERENCE]:.2f}: it keeps {kept_xsbench:.0%} of the gain",
        reason=""
        if kept_xsbench > 0.75
        else "our kernels are shorter, so more of their reads are first reads",
    )
    back = results.speedup(WRITES_BACK)
    saved = _writes_saved(results)
    yield Claim(
        what="Writing back instead of through changes the speed by less than 1%",
        source="text on dirty data",
        holds=abs(back / software - 1) < 0.01,
        found=f"{back:.3f} and {software:.3f}; it saves at most {saved:.0%} of a workload's writes",
    )
    added = _invalidation_share(results)
    yield Claim(
        what="Invalidations add negligible traffic",
        source="text on hardware coherence",
        holds=added < 0.1,
        found=f"{added:.1%} of what NUMA-GPU sends, on average",
        reason=""
        if added < 0.1
        else "a line that another GPU has used once stays shared until a local write ends "
        "that, with a chance of 1%; meanwhile each write is broadcast",
    )
    machine = Machine()
    yield Claim(
        what="Tag, epoch, valid bit and tracker fit into the spare bits of a line",
        source="footnote 3",
        holds=boundary.metadata_bits(machine) <= boundary.spare_bits(),
        found=f"{boundary.metadata_bits(machine)} of {boundary.spare_bits()} bits",
    )
    relative = results.relative("RandAccess", HARDWARE, NUMA)
    yield Claim(
        what="Random access is worse with the cache than without",
        source="Fig 9",
        holds=relative < 1,
        found=f"{relative:.2f} of NUMA-GPU's speed with hardware coherence",
    )


def _sensitivity(results: Results) -> Iterator[Claim]:
    speeds = [results.speedup(sized(gib)) for gib in SIZES_GIB]
    gains = [after / before - 1 for before, after in pairwise(speeds)]
    yield Claim(
        what="Doubling the cache brings less each time",
        source="Table V",
        holds=all(after <= before for before, after in pairwise(gains)) and min(gains) >= 0,
        found=", ".join(f"{gain:+.1%}" for gain in gains),
    )
    yield from (_gain_by_size(results, name) for name in ("XSBench", "HPGMG", "MCB"))
    losses = [_loss(results, system, 128, 32) for system in (HARDWARE, NUMA)]
    yield Claim(
        what="CARVE depends far less on the links than NUMA-GPU",
        source="Fig 14",
        holds=losses[0] < losses[1] / 2,
        found=f"from 128 to 32 GB/s CARVE loses {losses[0]:.0%}, NUMA-GPU {losses[1]:.0%}",
    )
    gaps = {rate: 1 - _of_ideal(results, rate) for rate in LINKS_GBYTES_PER_S}
    far = [rate for rate, gap in gaps.items() if gap > _NEAR]
    yield Claim(
        what="CARVE is very close to the ideal with every link",
        source="Fig 14",
        holds=not far,
        found=", ".join(f"{gap:.0%} below at {rate:g} GB/s" for rate, gap in gaps.items()),
        reason=_why_far(results) if far else "",
    )


def _gain_by_size(results: Results, name: str) -> Claim:
    speeds = results.by_name[name].speedups
    gain = speeds[sized(2.0)] / speeds[sized(0.5)] - 1
    holds = 0.35 <= gain <= 0.8
    return Claim(
        what=f"{name} gains 40 to 75% from 2 GB of cache per GPU instead of 0.5 GB",
        source="text on cache sizes",
        holds=holds,
        found=f"{gain:+.0%}",
        reason="its 254 MB (Table II) fit into each of the caches, whatever it does" if name == "MCB" else "",
    )


def _part_kept(speed: float, least: float, most: float) -> float:
    return (speed - least) / (most - least)


def _writes_saved(results: Results) -> float:
    pairs: Sequence[tuple[int, int]] = [
        (each.sent_writes[WRITES_BACK], each.sent_writes[SOFTWARE]) for each in results.by_name.values()
    ]
    return max(1 - back / through for back, through in pairs if through)


def _invalidation_share(results: Results) -> float:
    sent = [each.link_bytes for each in results.by_name.values()]
    return results.mean([(one[HARDWARE] - one[NO_COHERENCE]) / one[NUMA] for one in sent if one[NUMA]])


def _loss(results: Results, system: str, wide: float, narrow: float) -> float:
    return 1 - results.link_speedup(system, narrow) / results.link_speedup(system, wide)


def _of_ideal(results: Results, rate: float) -> float:
    return results.link_speedup(HARDWARE, rate) / results.link_speedup(IDEAL, rate)


def _why_far(results: Results) -> str:
    narrowest = LINKS_GBYTES_PER_S[0]
    gaps = {
        name: each.link_speedups[HARDWARE, narrowest] / each.link_speedups[IDEAL, narrowest]
        for name, each in results.by_name.items()
    }
    worst = sorted(gaps, key=lambda name: gaps[name])[:4]
    return (
        f"at {narrowest:g} GB/s, writes through and their invalidations fill the links; farthest are "
        + ", ".join(f"{name} ({gaps[name]:.0%} of ideal)" for name in worst)
    )

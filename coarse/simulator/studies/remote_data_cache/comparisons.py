"""The document's figures compared with ours."""

from __future__ import annotations

from collections.abc import Iterator

from coarse.simulator.studies.remote_data_cache import kernel_boundary as boundary
from coarse.simulator.studies.remote_data_cache.parameters import Machine
from coarse.simulator.studies.remote_data_cache.results import Results
from coarse.simulator.studies.remote_data_cache.systems import (
    HARDWARE,
    IDEAL,
    NO_COHERENCE,
    NUMA,
    REPLICATION,
    sized,
)
from coarse.simulator.studies.study import Basis, Comparison

ALIKE = 0.95
"""From this part of another system's speed on, a workload counts as no slower."""

_NUM_KERNELS = 1000  # ends of kernels without a rollover


def table_four() -> Iterator[Comparison]:
    """Kernel-launch delays under software coherence, and the bits of a line."""
    machine = Machine()
    cache, remote = machine.cache_bytes, machine.remote_cache_bytes
    us, ms = boundary.MICROSECOND, boundary.MILLISECOND
    yield _exact("invalidate the LLC", 4, boundary.cache_invalidation_s(machine) / us, "us")
    yield _exact("invalidate the remote data cache, line by line", 2, boundary.local_s(remote) / ms, "ms")
    epochs_ms = boundary.epoch_invalidation_s(machine, _NUM_KERNELS) / ms
    yield _exact(f"invalidate the remote data cache by epochs, {_NUM_KERNELS} kernels", 0, epochs_ms, "ms")
    yield _exact("flush a dirty LLC to its own memory", 8, boundary.local_s(cache) / us, "us")
    yield _exact("flush a dirty LLC to another GPU", 128, boundary.remote_s(cache) / us, "us")
    yield _exact("flush a dirty remote data cache", 32, boundary.remote_s(remote) / ms, "ms")
    yield _exact("spare bits of a line's ECC", 56, boundary.spare_bits(), "", "footnote 3")
    yield _exact("bits of a tag", 6, boundary.tag_bits(machine), "", "footnote 3")


def speedups(results: Results) -> Iterator[Comparison]:
    """Figures 9 and 13, Table V(a)."""
    yield _fitted("NUMA-GPU, over one GPU", 2.53, results.speedup(NUMA), "Table V")
    yield _fitted("ideal, over one GPU", 3.7, results.speedup(IDEAL), "Fig 13")
    yield _predicted("read-only replication, over one GPU", 2.75, results.speedup(REPLICATION), "Fig 13")
    for gib, document in ((0.5, 3.50), (1.0, 3.55), (2.0, 3.61), (4.0, 3.65)):
        yield _predicted(f"CARVE-{gib:g}GB, over one GPU", document, results.speedup(sized(gib)), "Table V")
    ideal = results.speedup(IDEAL)
    yield _predicted(
        "CARVE without coherence, of ideal", 0.95, results.speedup(NO_COHERENCE) / ideal, "Fig 9"
    )
    yield _predicted("CARVE-HWC, of ideal", 0.94, results.speedup(HARDWARE) / ideal, "abstract")
    rand = results.relative("RandAccess", NO_COHERENCE, NUMA)
    yield _fitted("RandAccess, CARVE without coherence, of NUMA-GPU", 0.90, rand, "Fig 9")


def host_memory(results: Results) -> Iterator[Comparison]:
    """Table V(b)."""
    for gib, document in ((0.5, 0.96), (1.0, 0.94), (2.0, 0.83), (4.0, 0.76)):
        what = f"speed when {100 * gib / 32:.3g}% of the pages lie in the host's memory"
        yield _predicted(what, document, results.slowdown(gib), "Table V")


def sharing(results: Results) -> Iterator[Comparison]:
    """Figures 4 and 8, and counts and means of the text."""
    each = results.by_name.values()
    yield _fitted("remote accesses, NUMA-GPU", 0.40, results.remote_share(NUMA), "Fig 8")
    yield _predicted(
        "remote accesses, CARVE",
        0.08,
        results.remote_share(NO_COHERENCE),
        "Fig 8",
    )
    yield _predicted(
        "accesses to pages that are shared and written",
        0.40,
        results.mean([one.pages.read_write_share for one in each]),
        "Fig 4",
        reason="a grid code's pages count as written and shared from one kernel on that sweeps in another order, "
        "although most kernels do not; and weights of AlexNet and OverFeat share pages with activations",
    )
    copies = results.mean([one.pages.copies for one in each])
    yield _predicted("memory if all shared pages are replicated", 2.4, copies, "text on replication")
    yield _fitted("workloads that NUMA-GPU serves well", 8, _num_alike(results, NUMA), "introduction")
    helped = _num_alike(results, REPLICATION) - _num_alike(results, NUMA)
    yield _fitted("further workloads that read-only replication serves well", 3, helped, "introduction")


def _num_alike(results: Results, system: str) -> int:
    return sum(results.relative(name, system) >= ALIKE for name in results.by_name)


def _exact(what: str, document: float, simulated: float, unit: str, source: str = "Table IV") -> Comparison:
    return Comparison(
        what=what, document=document, simulated=simulated, unit=unit, source=source, basis=Basis.EXACT
    )


def _fitted(what: str, document: float, simulated: float, source: str) -> Comparison:
    return Comparison(what=what, document=document, simulated=simulated, source=source, basis=Basis.FITTED)


def _predicted(what: str, document: float, simulated: float, source: str, reason: str = "") -> Comparison:
    return Comparison(
        what=what,
        document=document,
        simulated=simulated,
        source=source,
        basis=Basis.PREDICTED,
        reason=reason,
    )

"""The study of CARVE, the document about caching remote data in video memory."""

from __future__ import annotations

from collections.abc import Iterator

from coarse.simulator.studies.remote_data_cache import comparisons
from coarse.simulator.studies.remote_data_cache.accesses.workloads import OTHER_PARAMETERS, workload_table
from coarse.simulator.studies.remote_data_cache.caches import traces
from coarse.simulator.studies.remote_data_cache.claims import all_claims
from coarse.simulator.studies.remote_data_cache.parameter_updates import update_table
from coarse.simulator.studies.remote_data_cache.parameters import SCALE, parameter_table
from coarse.simulator.studies.remote_data_cache.results import (
    LINK_SYSTEMS,
    LINKS_GBYTES_PER_S,
    Results,
    simulate_all,
)
from coarse.simulator.studies.remote_data_cache.systems import (
    HARDWARE,
    IDEAL,
    MIGRATION,
    NO_COHERENCE,
    NUMA,
    REPLICATION,
    SOFTWARE,
)
from coarse.simulator.studies.study import Comparison, Progress, StateTable, Study, StudyResult

_SHOWN = (NUMA, MIGRATION, REPLICATION, SOFTWARE, HARDWARE, NO_COHERENCE, IDEAL)


def run(progress: Progress) -> StudyResult:
    """Simulates all workloads on all systems, and compares."""
    # Slow to import, and not needed for traces.
    from coarse.simulator.studies.remote_data_cache import pictures

    results = simulate_all(progress)
    return StudyResult(
        comparisons=list(all_comparisons(results)),
        claims=list(all_claims(results)),
        tables=[
            _speedup_table(results),
            _link_table(results),
            parameter_table(OTHER_PARAMETERS),
            workload_table(),
            update_table(),
        ],
        pictures={
            "workloads": pictures.workloads(results),
            "sensitivity": pictures.sensitivity(results),
        },
    )


def all_comparisons(results: Results) -> Iterator[Comparison]:
    """In the order of the document's tables and figures."""
    yield from comparisons.table_four()
    yield from comparisons.speedups(results)
    yield from comparisons.host_memory(results)
    yield from comparisons.sharing(results)


def _speedup_table(results: Results) -> StateTable:
    rows = [
        (
            name,
            *(f"{each.speedups[system]:.2f}" for system in _SHOWN),
            *(f"{each.remote_shares[system]:.0%}" for system in (NUMA, HARDWARE, NO_COHERENCE)),
            f"{each.broadcast_share:.0%}",
        )
        for name, each in results.by_name.items()
    ]
    return StateTable(
        title=f"Speed-ups over one GPU, remote accesses, and writes that are broadcast; sizes divided by {SCALE}",
        columns=(
            "workload",
            *_SHOWN,
            "remote, NUMA-GPU",
            "remote, CARVE-HWC",
            "remote, CARVE without coherence",
            "broadcast writes",
        ),
        rows=rows,
    )


def _link_table(results: Results) -> StateTable:
    return StateTable(
        title="Speed-ups over one GPU by link between GPUs",
        columns=("system", *(f"{rate:g} GB/s" for rate in LINKS_GBYTES_PER_S)),
        rows=[
            (system, *(f"{results.link_speedup(system, rate):.2f}" for rate in LINKS_GBYTES_PER_S))
            for system in LINK_SYSTEMS
        ],
    )


STUDY = Study(
    name="carve",
    title="GPUs that cache each other's memory in their own",
    document="Young and others, Combining HW/SW Mechanisms to Improve NUMA Performance of Multi-GPU Systems, 2018",
    run=run,
    traces={"epochs": traces.epochs, "tracker": traces.tracker},
)

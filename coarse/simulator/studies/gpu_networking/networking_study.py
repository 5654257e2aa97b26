"""The study of LeBeane's six ways to let GPUs communicate."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from coarse.simulator.studies.gpu_networking.comparisons import (
    active_message_figures,
    application_figures,
    claims,
    put_figures,
)
from coarse.simulator.studies.gpu_networking.control_paths import HDN, SIX
from coarse.simulator.studies.gpu_networking.stages import (
    BLOCKED,
    PARAMETERS,
    REDUCTIONS,
)
from coarse.simulator.studies.gpu_networking.traces import (
    best_us,
    index_trace,
    ring_trace,
    schemes_table,
    trigger_trace,
)
from coarse.simulator.studies.gpu_networking.training import speedup
from coarse.simulator.studies.sourced import parameter_table
from coarse.simulator.studies.study import (
    Progress,
    StateTable,
    Study,
    StudyResult,
)

if TYPE_CHECKING:  # slow to import
    from matplotlib.figure import Figure

_MIB = 1 << 20


def _projection() -> StateTable:
    """Projected speed-ups over HDN; the sizes of the workloads' reductions are not printed."""
    sizes = {"64 KiB": 64 << 10, "1 MiB": _MIB}
    ratios = {
        (path.who.name, size): best_us(HDN, nbytes, 8) / best_us(path, nbytes, 8)
        for path in SIX
        for size, nbytes in sizes.items()
    }
    return StateTable(
        title="Projected speed-ups over HDN on 8 nodes, if every reduction had one size",
        columns=("workload", "blocked", "reductions", *(f"{name}, {size}" for name, size in ratios)),
        rows=[
            (
                workload,
                f"{blocked:.0%}",
                str(REDUCTIONS[workload]),
                *(f"{speedup(blocked, ratio):.3f}" for ratio in ratios.values()),
            )
            for workload, blocked in BLOCKED.items()
        ],
    )


def _pictures() -> Mapping[str, Figure]:
    if find_spec("matplotlib") is None:
        return {}
    from coarse.simulator.studies.gpu_networking import pictures

    return {
        "stages": pictures.stages_figure(),
        "puts": pictures.puts_figure(),
        "all-reduce": pictures.all_reduce_figure(),
    }


def _run(progress: Progress) -> StudyResult:
    progress("messages by stages")
    comparisons = [*active_message_figures(), *put_figures()]
    progress("ring all-reduce under each scheme")
    comparisons += application_figures()
    found = list(claims())
    progress("tables and pictures")
    return StudyResult(
        comparisons=comparisons,
        claims=found,
        tables=[
            schemes_table(),
            _projection(),
            ring_trace(),
            trigger_trace(),
            index_trace(),
            parameter_table("Parameters of gpu-networking", PARAMETERS),
        ],
        pictures=_pictures(),
    )


STUDY = Study(
    name="gpu-networking",
    title="Who prepares, triggers and completes a GPU's message",
    document="LeBeane, Optimizing Communication for Clusters of GPUs, PhD defense, 2018",
    run=_run,
    traces={"ring": ring_trace, "triggers": trigger_trace, "indices": index_trace},
)

"""The study of Oden's communication methods for distributed GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from coarse.simulator.studies.distributed_gpus.claims import (
    application_claims,
    reduction_claims,
    transfer_claims,
)
from coarse.simulator.studies.distributed_gpus.comparisons import (
    application_figures,
    global_address_space_figures,
    put_get_figures,
    transfer_figures,
)
from coarse.simulator.studies.distributed_gpus.machines import PARAMETERS
from coarse.simulator.studies.distributed_gpus.tables import (
    last_block_trace,
    notification_trace,
    switch_table,
    synchronisation_table,
)
from coarse.simulator.studies.sourced import parameter_table
from coarse.simulator.studies.study import Progress, Study, StudyResult

if TYPE_CHECKING:  # slow to import
    from matplotlib.figure import Figure


def _pictures() -> Mapping[str, Figure]:
    if find_spec("matplotlib") is None:
        return {}
    from coarse.simulator.studies.distributed_gpus import pictures

    return {
        "transfers": pictures.transfers_figure(),
        "all-reduce": pictures.all_reduce_figure(),
        "message-rate": pictures.message_rate_figure(),
    }


def _run(progress: Progress) -> StudyResult:
    progress("direct, staged and hybrid writes")
    comparisons, claims = list(transfer_figures()), list(transfer_claims())
    progress("puts by the GPU")
    comparisons += put_get_figures()
    progress("global address space")
    comparisons += global_address_space_figures()
    claims += reduction_claims()
    progress("applications and energy")
    comparisons += application_figures()
    claims += application_claims()
    progress("tables and pictures")
    return StudyResult(
        comparisons=comparisons,
        claims=claims,
        tables=[
            switch_table(),
            synchronisation_table(),
            notification_trace(),
            last_block_trace(),
            parameter_table("Parameters of distributed-gpus", PARAMETERS),
        ],
        pictures=_pictures(),
    )


STUDY = Study(
    name="distributed-gpus",
    title="Direct communication methods for distributed GPUs",
    document="Oden, Direct Communication Methods for Distributed GPUs, dissertation, 2014",
    run=_run,
    traces={"notifications": notification_trace, "last-block": last_block_trace},
)

"""The study: its tables, claims and pictures together."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from coarse.simulator.studies.dgx1 import pre_volta, volta
from coarse.simulator.studies.dgx1.claims import claims
from coarse.simulator.studies.dgx1.reasons import explained
from coarse.simulator.studies.dgx1.tables import algorithm_table, parameter_table, tree_table
from coarse.simulator.studies.study import Comparison, Progress, Study, StudyResult

if TYPE_CHECKING:  # slow to import
    from matplotlib.figure import Figure

PARTS = {
    "Table 2.4: two GPUs": pre_volta.profiles,
    "Table 2.5: ImageNet on two GPUs": pre_volta.two_gpus,
    "Table 2.6: up to 8 P100": pre_volta.eight_gpus,
    "shared memory": pre_volta.shared_memory,
    "LeNet on V100": volta.lenet_speed_ups,
    "NCCL on V100": volta.nccl_gains,
    "Table 2.8: NCCL's overhead": volta.nccl_overheads,
    "Table 2.10: memory of GPU 0": volta.root_memory,
}
"""Comparisons by the words for their progress."""


def _run(progress: Progress) -> StudyResult:
    comparisons: list[Comparison] = []
    for words, part in PARTS.items():
        progress(words)
        comparisons += explained(part())
    progress("claims and pictures")
    return StudyResult(
        comparisons=comparisons,
        claims=tuple(claims()),
        tables=(parameter_table(), algorithm_table()),
        pictures=_pictures(comparisons),
    )


def _pictures(comparisons: list[Comparison]) -> dict[str, Figure]:
    """All pictures; none without matplotlib."""
    if find_spec("matplotlib") is None:
        return {}
    from coarse.simulator.studies.dgx1.pictures import copies_figure, scaling_figure

    return {"scaling": scaling_figure(), "copies": copies_figure(comparisons)}


STUDY = Study(
    name="dgx1",
    title="MXNet's tree over GPUs and NCCL, on DGX-1 and two machines with two GPUs",
    document="Mojumder, MGPU-TSM (Boston University, 2021), chapters 1 and 2",
    run=_run,
    traces={"tree": tree_table, "algorithms": algorithm_table},
)

"""The processes of a process group's ranks, and their start parameters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from process_pool import ProcessPool

import coarse
from coarse.machine.toml_lines import read_toml

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


def installed_coarse(folder: Path) -> Path:
    """Makes `folder` look, to importlib.metadata, as if this source tree were installed in it."""
    project = read_toml(_ROOT / "pyproject.toml").values["project"]
    information = folder / f"coarse_train-{coarse.__version__}.dist-info"
    information.mkdir()
    information.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {coarse.__version__}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    information.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def environment(site: Path, **variables: str) -> dict[str, str]:
    """What a rank's process is started with."""
    paths = [str(site), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(_ROOT / "build" / "test-cache"),  # compiled backends are kept from run to run
        **variables,
    }


class RankPool(ProcessPool):
    """The ranks of one backend.

    Args:
        backend: For init_process_group.
        site: For PYTHONPATH.
        variables: More of the environment.
        nodes: The node of each rank, by any name.
    """

    def __init__(
        self, backend: str, site: Path, *, nodes: Sequence[str] = ("", ""), **variables: str
    ) -> None:
        environments = [environment(site, COARSE_NODE=node, **variables) for node in nodes]
        script = _HERE / "rank_worker.py"
        super().__init__(backend, script, [backend], environments, is_peer=backend == "gloo")

    def run(self, scenario: str, *, is_on_one_node: bool = False) -> list[Any]:
        """Runs `scenario` in all ranks; what it returned, by rank.

        Args:
            scenario: Its name.
            is_on_one_node: Whether the ranks are to form one node for its time.

        Raises:
            ScenarioError: If it raised in a rank, or did not end in time.
        """
        self.submit(scenario, is_on_one_node=is_on_one_node)
        return self.collect()

    def submit(self, scenario: str, *, is_on_one_node: bool = False) -> None:
        """Starts `scenario` in all ranks."""
        self.request((scenario, is_on_one_node))

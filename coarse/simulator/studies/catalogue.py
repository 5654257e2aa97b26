"""The studies by name. Each module is imported only when its study is asked for."""

from __future__ import annotations

from importlib import import_module

from coarse.simulator.studies.study import Study

_MODULES: dict[str, str] = {
    "carve": "remote_data_cache.carve_study",
    "dgx1": "dgx1.dgx1_study",
    "distributed-gpus": "distributed_gpus.distributed_study",
    "gpu-networking": "gpu_networking.networking_study",
    "mgcc": "coherence.mgcc_study",
    "mgpu-tsm": "coherence.tsm_study",
}
"""Name of a study to the module of this package whose STUDY it is, e.g. {"mgcc": "coherence.mgcc_study"}."""

NAMES = tuple(_MODULES)


def load_study(name: str) -> Study:
    """The study of this name.

    Raises:
        ValueError: If there is none.
    """
    if name not in _MODULES:
        raise ValueError(f"there is no study {name!r}; the studies are {', '.join(NAMES)}")
    study: Study = import_module(f"coarse.simulator.studies.{_MODULES[name]}").STUDY
    return study

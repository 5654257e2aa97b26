"""Worker pools that run scenarios under torch DDP, or under one of COARSE's configurations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from process_pool import ProcessPool

WORLD_SIZE = 2
_HERE = Path(__file__).parent

_SPREAD = "coarse, stand-in GPU each, spread"

_ON_CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # the same order of additions in every process

# The workers are on cuda:0, or each on one of its own.
_GPU_ENVIRONMENTS = {
    "ddp, cuda": _ON_CUDA,
    "coarse, cuda": _ON_CUDA,
    "coarse, slots too, cuda": {**_ON_CUDA, "COARSE_MEMORY_DEVICES": "cuda:0,cuda:0"},
    "coarse, stand-in GPU that has slots": {"COARSE_MEMORY_DEVICES": "cuda:0,cuda:0"},
    "coarse, stand-in GPU beside slots": {"COARSE_MEMORY_DEVICES": "cuda:1,cuda:1", "STAND_IN_GPUS": "2"},
    "coarse, stand-in GPU apart from slots": {
        "COARSE_MEMORY_DEVICES": "cuda:1,cuda:1",
        "STAND_IN_GPUS": "2",
        "STAND_IN_GPUS_ARE_APART": "all",
    },
    "coarse, stand-in GPU along routes": {
        "COARSE_MEMORY_DEVICES": "cuda:1,cuda:2",
        "STAND_IN_GPUS": "3",
        "STAND_IN_LINKS": "0:1:10000:0",
        "COARSE_ROUTING": "profile",
        "COARSE_ALGORITHM": "direct",
    },
    "coarse, stand-in GPU each": {
        "COARSE_MEMORY_DEVICES": "cuda:0,cuda:1",
        "STAND_IN_GPUS": "2",
        "COARSE_ALGORITHM": "direct",
    },
    _SPREAD: {
        "COARSE_MEMORY_DEVICES": "cuda:0,cuda:1",
        "STAND_IN_GPUS": "2",
        "STAND_IN_PAGE_BYTES": "4096",
        "COARSE_ALGORITHM": "direct",
    },
    "coarse, stand-in GPU each, by NCCL": {"STAND_IN_GPUS": "2", "COARSE_DUAL_SYNC": "0"},
    "coarse, stand-in GPU each, slots by NCCL": {
        "COARSE_MEMORY_DEVICES": "cuda:0,cuda:1",
        "STAND_IN_GPUS": "2",
        "COARSE_DUAL_SYNC": "0",
    },
    "coarse, stand-in GPU each, partly apart": {
        "COARSE_MEMORY_DEVICES": "cuda:0,cuda:1,cuda:2",
        "STAND_IN_GPUS": "3",
        "STAND_IN_GPUS_ARE_APART": "0:2",
        "STAND_IN_PAGE_BYTES": "4096",
        "COARSE_ALGORITHM": "direct",
    },
}


class WorkerPool(ProcessPool):
    """Two workers of one strategy that run scenarios together, on one node or on one each.

    Strategies are "ddp", "coarse", "coarse, direct all-reduce", where workers reduce everything themselves after the
    first steps, "coarse, stand-in GPU", where gradients take the way of a GPU's (gpu_stand_in.py), and "coarse,
    stand-in GPU that has slots", where memory devices are on it too; ", emulated machine" behind that gives them the
    links of aws-p3. "coarse, stand-in GPU beside slots" has memory devices on a second one, which "coarse, stand-in
    GPU apart from slots" cannot reach; "coarse, stand-in GPU along routes" has them on a second and a third one, with
    the slots of both workers on the latter. "coarse, stand-in GPU each" has each worker on a GPU with its memory
    device, the first worker on that of the home device; ", spread" behind that has pages so small that models lie
    on both, and a worker that sees the second GPU alone; ", partly apart" has such pages, and slots on a third GPU
    too, which the first cannot reach; ", by NCCL" has the workers reduce everything themselves after the first steps,
    with memory devices on the host, ", slots by NCCL" with these on the GPUs. "ddp, cuda" and "coarse, cuda" have
    both models on the first GPU, "coarse, slots too, cuda" the memory devices too.

    `stand_ins` is the folder of libraries that stand in for CUDA's.
    """

    def __init__(self, strategy: str, *, num_nodes: int = 1, stand_ins: Path | None = None) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1", COARSE_TIMEOUT_S="100")
        if strategy == "coarse, direct all-reduce":
            environment["COARSE_DUAL_SYNC"] = "0"
        if stand_ins is not None:
            environment["LD_LIBRARY_PATH"] = environment["XDG_CACHE_HOME"] = str(stand_ins)
        environment |= _GPU_ENVIRONMENTS.get(strategy.removesuffix(", emulated machine"), {})
        if strategy.endswith(", emulated machine"):
            environment |= {"COARSE_MACHINE": "aws-p3", "COARSE_TIME_DILATION": "2"}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(_HERE.parents[1]), os.environ.get("PYTHONPATH")])
        )
        nodes = [rank * num_nodes // WORLD_SIZE for rank in range(WORLD_SIZE)]
        environments = [{**environment, "COARSE_NODE": str(node)} for node in nodes]
        if strategy == _SPREAD:
            environments[1]["CUDA_VISIBLE_DEVICES"] = "1"
        script = _HERE / "parity_worker.py"
        is_peer = strategy.startswith("ddp")
        super().__init__(strategy, script, [strategy], environments, is_peer=is_peer, has_torch=True)
        self.kept_results: dict[str, list[Any]] = {}

    def submit(self, scenario: str) -> None:
        """Starts `scenario` on all workers."""
        self.request(scenario)

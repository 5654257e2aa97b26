"""One worker of a pool: runs scenarios by name and sends back what they return.

Started by parity_pool.WorkerPool with its strategy, a rendezvous file and the number of a pipe.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import fast_torch  # noqa: F401, before the next one
import torch
import torch.distributed as dist

from coarse.tuning import gpu_dual_sync, replanner

DIRECT_ALLREDUCE = (
    "coarse, direct all-reduce",
    "coarse, stand-in GPU each, by NCCL",
    "coarse, stand-in GPU each, slots by NCCL",
)
STAND_IN_GPU = "coarse, stand-in GPU"
A_GPU_EACH = "coarse, stand-in GPU each"
ON_CUDA = ", cuda"


def class_of(strategy: str) -> Any:
    """The class under test, or the one it is compared with."""
    if strategy.startswith("ddp"):
        return torch.nn.parallel.DistributedDataParallel
    from coarse.torch import DistributedDataParallel

    return DistributedDataParallel


def wrapper_of(strategy: str, device: torch.device) -> Any:
    """What wraps modules; they are made on the processor, so that parameters begin with the same values anywhere."""
    wrapped = class_of(strategy)
    if device.type == "cpu":
        return wrapped
    return lambda module, **options: wrapped(module.to(device), **options)


def main() -> None:
    strategy, rendezvous, pipe = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if strategy in DIRECT_ALLREDUCE:  # before scenarios end, which have few steps
        replanner.TIMED_STEPS = gpu_dual_sync.TIMED_STEPS = 1
    if strategy.startswith(STAND_IN_GPU):
        import gpu_stand_in

        sees_its_own_alone = "CUDA_VISIBLE_DEVICES" in os.environ
        gpu_stand_in.install(rank if strategy.startswith(A_GPU_EACH) and not sees_its_own_alone else 0)
    device = torch.device("cuda:0" if strategy.endswith(ON_CUDA) else "cpu")
    torch.backends.cudnn.deterministic = True  # else two processes may take different algorithms
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    from bert_optimizer_scenarios import BERT_SCENARIOS, SAME_GRADIENTS_SCENARIOS
    from checkpoint_scenarios import CHECKPOINT_SCENARIOS
    from contract_scenarios import CONTRACT_SCENARIOS
    from embedding_scenarios import EMBEDDING_SCENARIOS
    from narrow_optimizer_scenarios import NARROW_SCENARIOS
    from optimizer_parts_scenarios import PARTS_SCENARIOS
    from optimizer_scenarios import OPTIMIZER_SCENARIOS
    from parity_scenarios import PARITY_SCENARIOS
    from scenario import Context
    from staleness_scenarios import STALENESS_SCENARIOS
    from table_scenarios import TABLE_SCENARIOS
    from training_loops import TrainingLoop, run

    scenarios = {
        **PARITY_SCENARIOS,
        **CONTRACT_SCENARIOS,
        **OPTIMIZER_SCENARIOS,
        **PARTS_SCENARIOS,
        **NARROW_SCENARIOS,
        **BERT_SCENARIOS,
        **SAME_GRADIENTS_SCENARIOS,
        **CHECKPOINT_SCENARIOS,
        **EMBEDDING_SCENARIOS,
        **TABLE_SCENARIOS,
        **STALENESS_SCENARIOS,
    }

    context = Context(
        rank=rank,
        world_size=world_size,
        wrap=wrapper_of(strategy, device),
        is_coarse=strategy.startswith("coarse"),
        device=device,
    )
    connection = Connection(int(pipe))
    connection.send(("result", "ready"))
    while (what := connection.recv()) is not None:
        torch.manual_seed(1234)
        try:
            result = run(context, what) if isinstance(what, TrainingLoop) else scenarios[what].run(context)
            connection.send(("result", result))
        except Exception:
            connection.send(("error", traceback.format_exc()))
    connection.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

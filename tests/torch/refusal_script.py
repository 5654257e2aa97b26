"""Asks for what a new worker could not go on with. Run by `coarse run --on-loss replace`.

    refusal_script.py REPORT-FOLDER dense|sparse|stale

REPORT-FOLDER/refusals-RANK names what this worker has asked for, with what the errors say.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import fast_torch  # noqa: F401, before the next one
import torch
import torch.distributed as dist
from torch import nn

import coarse.torch
from coarse.torch.checkpoint import Checkpointer

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]


def refusal(ask: Callable[[], object]) -> str:
    try:
        ask()
    except ValueError as error:
        return str(error)
    return "nothing is refused"


def average_elsewhere(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def dense_refusals() -> dict[str, str]:
    wrap = coarse.torch.DistributedDataParallel
    group = dist.new_group([0, 1])
    said = {"group": refusal(lambda: wrap(nn.Linear(2, 1), process_group=group))}
    model = wrap(nn.Linear(2, 1))
    said["second model"] = refusal(lambda: wrap(nn.Linear(2, 1)))
    said["checkpointer"] = refusal(lambda: Checkpointer(FOLDER / "checkpoints", model))
    said["join"] = refusal(lambda: model.join().__enter__())
    model.register_comm_hook(None, average_elsewhere)
    said["hook"] = refusal(lambda: model(torch.ones(1, 2)))
    return said


def sparse_refusals() -> dict[str, str]:
    table = nn.Embedding(8, 2, sparse=True)
    return {"sparse": refusal(lambda: coarse.torch.DistributedDataParallel(table))}


def stale_refusals() -> dict[str, str]:
    model = coarse.torch.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    coarse.torch.DistributedOptimizer(optimizer, model, staleness=1)
    return {"staleness": refusal(lambda: model(torch.ones(1, 2)))}


def main() -> None:
    coarse.torch.init_process_group()
    said = {"dense": dense_refusals, "sparse": sparse_refusals, "stale": stale_refusals}[MODE]()
    (FOLDER / f"refusals-{os.environ['RANK']}").write_text(json.dumps(said))


if __name__ == "__main__":
    main()

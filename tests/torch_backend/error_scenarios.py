"""What goes wrong; each returns the texts of the errors that this rank had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _error_of(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def mismatches_are_told_and_survived() -> Any:
    rank = dist.get_rank()
    errors = {
        "shape": _error_of(lambda: dist.all_reduce(torch.zeros(3 + rank))),
        "dtype": _error_of(
            lambda: dist.all_reduce(torch.zeros(3, dtype=(torch.float32, torch.float64)[rank % 2]))
        ),
        "operation": _error_of(
            lambda: dist.all_reduce(torch.zeros(3)) if rank == 0 else dist.broadcast(torch.zeros(3), 0)
        ),
        "root": _error_of(lambda: dist.broadcast(torch.zeros(3), rank)),
        "operator": _error_of(
            lambda: dist.all_reduce(torch.zeros(3), (dist.ReduceOp.MAX, dist.ReduceOp.MIN)[rank % 2])
        ),
        "split": _error_of(
            lambda: dist.all_to_all_single(
                torch.zeros(2 * dist.get_world_size()),
                torch.zeros(dist.get_world_size() * (2 + rank)),
            )
        ),
    }
    tensor = torch.full((4,), float(rank + 1))
    dist.all_reduce(tensor)
    return [errors, tensor.tolist()]


def wrong_arguments_are_refused() -> Any:
    size = dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # torch itself lets meta tensors do nothing
    return {
        "op": _error_of(lambda: dist.all_reduce(torch.zeros(3), dist.ReduceOp.BAND)),
        "device": _error_of(lambda: backend.allreduce([torch.zeros(3, device="meta")])),
        "outputs": _error_of(lambda: dist.all_gather([torch.zeros(3)] * (size + 1), torch.zeros(3))),
        "flat": _error_of(lambda: dist.all_gather_into_tensor(torch.zeros(3 * size + 1), torch.zeros(3))),
    }


ERRORS: dict[str, Callable[[], Any]] = {
    scenario.__name__: scenario
    for scenario in (mismatches_are_told_and_survived, wrong_arguments_are_refused)
}

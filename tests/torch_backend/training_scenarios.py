"""What torch builds on collectives, under either backend; each returns parameters or tensors to be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


class Branches(nn.Module):
    """A model of which each step uses a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.heads = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])

    def forward(self, inputs: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head](self.norm(self.first(inputs)).relu())


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def _train(
    model: nn.Module, *, steps: int = STEPS, arguments: Callable[[int], tuple[Any, ...]] = lambda _: ()
) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        model(torch.randn(4, 8), *arguments(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def ddp() -> Any:
    return _train(DistributedDataParallel(_mlp()))


def ddp_with_unused_parameters_and_buffers() -> Any:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    return [
        _train(model, arguments=lambda step: ((step + dist.get_rank()) % 2,)),
        model.module.norm.running_mean,
    ]


def ddp_with_bucket_views_in_small_buckets() -> Any:
    return _train(DistributedDataParallel(_mlp(), gradient_as_bucket_view=True, bucket_cap_mb=0.001))


def ddp_of_bfloat16() -> Any:
    model = DistributedDataParallel(_mlp().to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        model(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


TRAINING: dict[str, Callable[[], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        ddp,
        ddp_with_unused_parameters_and_buffers,
        ddp_with_bucket_views_in_small_buckets,
        ddp_of_bfloat16,
    )
}

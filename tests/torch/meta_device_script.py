"""Worker 1 builds its model on the meta device: an optimizer or the first forward brings worker 0's values.

Run by a launcher, with two workers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import coarse.torch

RANK = int(os.environ["RANK"])
WIDTH = 3072  # 36 MiB a matrix


class Model(nn.Module):
    """Has a matrix that stands in two places, one that is not trained, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, 4).requires_grad_(False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("offset", torch.full((WIDTH,), 1.0 + RANK))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.tied(self.norm(self.first(rows))) + self.offset)


def build(on_meta: int) -> Model:
    torch.manual_seed(RANK)
    with torch.device("meta" if on_meta == RANK else "cpu"):
        return Model()


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=1e-3)


def anonymous_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def refused() -> Any:
    return pytest.raises(RuntimeError, match="have no values yet")


def check_equal(module: nn.Module) -> None:
    """Checks that all workers have the same non-zero parameters."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        both = [torch.empty_like(tensor) for _ in range(2)]
        torch.distributed.all_gather(both, tensor.detach())
        assert torch.equal(*both), name
    assert module.first.weight.abs().sum() > 0
    assert module.frozen.weight.abs().sum() > 0
    assert module.offset[0] == 1


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + RANK)
        model(torch.randn(3, WIDTH, generator=generator)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.module.named_parameters():
        both = [torch.empty_like(parameter) for _ in range(2)]
        torch.distributed.all_gather(both, parameter.detach())
        assert torch.equal(*both), name


module = build(on_meta=1)
wrapped = sgd(module)  # keeps the parameters that it has
model = coarse.torch.DistributedDataParallel(module)
if RANK == 1:
    with refused():
        module(torch.ones(2, WIDTH))
    with refused():
        module.state_dict()
before = anonymous_bytes()
optimizer = coarse.torch.DistributedOptimizer(wrapped, model)
assert optimizer.runs_in_memory_devices
if RANK == 1:
    assert anonymous_bytes() - before < 32 << 20, "a model from the meta device takes memory of its own"
check_equal(module)
assert module.first.weight is module.tied.weight
train(model, optimizer)
model.close()

module = build(on_meta=1)
before = anonymous_bytes()
model = coarse.torch.DistributedDataParallel(module)
if RANK == 1:
    assert anonymous_bytes() - before < 32 << 20, "a wrapped model from the meta device takes memory"
    with torch.no_grad(), refused():
        model(torch.ones(2, WIDTH))
train(model, sgd(model))

with pytest.raises(ValueError, match="no values on worker 0"):
    coarse.torch.DistributedDataParallel(build(on_meta=0))
print("as worker 0", flush=True)

"""Scenarios of training with parameters that lack the last updates."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from scenario import Context, Scenario, assert_equal_on_all_workers, mlp, raises, scenario
from torch import nn

STALENESS_SCENARIOS: dict[str, Scenario] = {}
STEPS = 40
# 40 updates whose roundings differ by the order of a sum or a fused operation.
TOLERANCE = 2e-6


def offload(model: Any, optimizer: Any, **options: Any) -> Any:
    from coarse.torch import DistributedOptimizer

    distributed = DistributedOptimizer(optimizer, model, **options)
    assert distributed.runs_in_memory_devices
    return distributed


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def loss_of(model: Any, context: Context, step: int) -> torch.Tensor:
    inputs = context.inputs(step, 16, 8)
    return (model(inputs) - inputs[:, :4]).square().mean()


def run_stale(context: Context, *, staleness: int, overlap: bool) -> list[torch.Tensor]:
    """Training with copies that are pulled every staleness + 1 updates; under torch, by hand."""
    module = mlp()
    if context.is_coarse:
        model = context.wrap(module)
        optimizer = offload(model, make_optimizer(model.parameters()), staleness=staleness, overlap=overlap)
        for step in range(STEPS):
            # Without overlap, step() has used gradients when it returns.
            optimizer.zero_grad(set_to_none=overlap)
            loss_of(model, context, step).backward()
            if context.rank == 1:
                time.sleep(0.005)
            optimizer.step()
        statistics = optimizer.cache_statistics
        assert statistics.largest_lag == staleness
        assert statistics.misses == (STEPS - 1) // (staleness + 1)
        optimizer.pull()
        assert_equal_on_all_workers(context, module.parameters())
        return [parameter.detach().clone() for parameter in module.parameters()]
    newest = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = make_optimizer(newest)
    for step in range(STEPS):
        if step % (staleness + 1) == 0:
            for parameter, new in zip(module.parameters(), newest, strict=True):
                parameter.data.copy_(new)
        module.zero_grad()
        loss_of(module, context, step).backward()
        for parameter, new in zip(module.parameters(), newest, strict=True):
            dist.all_reduce(parameter.grad)
            new.grad = parameter.grad / context.world_size
        optimizer.step()
    return newest


for _staleness in (1, 3):
    for _overlap in (False, True):

        def _run(context: Context, _staleness: int = _staleness, _overlap: bool = _overlap) -> Any:
            return run_stale(context, staleness=_staleness, overlap=_overlap)

        _name = f"parameters_are_{_staleness}_updates_old_{'overlapped' if _overlap else 'in_step'}"
        STALENESS_SCENARIOS[_name] = Scenario(_run, True, TOLERANCE)


def holds(function: Any) -> Any:
    return scenario(function, registry=STALENESS_SCENARIOS, compare=False)


@holds
def a_worker_does_not_wait_for_a_slower_one(context: Context) -> Any:
    """It goes on into its next forward, but not to the end of that one."""
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(model, make_optimizer(model.parameters()), staleness=1, overlap=True)
    late = torch.zeros(1, dtype=torch.float64)
    loss = loss_of(model, context, 0)
    if context.rank == 1:
        # Until worker 0 is in its second forward: if it waited for this worker's gradients, this would never end.
        dist.recv(late, src=0)
    loss.backward()
    optimizer.step()
    if context.rank == 0:
        model.module(context.inputs(1, 16, 8))
        dist.send(late, dst=1)
    loss_of(model, context, 1).backward()
    optimizer.step()
    optimizer.pull()
    assert_equal_on_all_workers(context, module.parameters())


@holds
def what_is_saved_is_exact(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(model, make_optimizer(model.parameters()), staleness=3, overlap=True)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
    stale = [parameter.detach().clone() for parameter in module.parameters()]
    with optimizer.remote_parameters.snapshot() as snapshot:
        kept = torch.frombuffer(bytearray(snapshot.read(0, 0)), dtype=torch.float32)
    saved = module.state_dict()
    first = next(iter(saved.values()))
    assert torch.equal(first.flatten(), kept[: first.numel()])
    assert not torch.equal(first, stale[0])
    assert all(int(state["step"]) == 3 for state in optimizer.state_dict()["state"].values())


@holds
def what_is_loaded_goes_to_the_memory_devices(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(model, torch.optim.SGD(model.parameters(), lr=1.0), staleness=2)
    loaded = {name: torch.full_like(value, 0.5) for name, value in module.state_dict().items()}
    loss_of(model, context, 0).backward()
    optimizer.step()
    model.load_state_dict(loaded)
    optimizer.pull()
    assert all(torch.equal(parameter, torch.full_like(parameter, 0.5)) for parameter in module.parameters())


@holds
def what_is_written_to_copies_goes_to_the_memory_devices(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(model, torch.optim.SGD(model.parameters(), lr=0.0), staleness=2)
    for step in range(4):
        loss_of(model, context, step).backward()
        optimizer.step()
        with torch.no_grad():
            module[0].weight.fill_(step)
        module[2].weight.data = torch.full_like(module[2].weight, -step)
    optimizer.pull()
    assert bool((module[0].weight == 3).all())
    assert bool((module[2].weight == -3).all())


@holds
def digits_are_learned_with_parameters_of_two_updates_ago(context: Context) -> Any:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (
        torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16,
        torch.tensor(digits.target),
    )
    training = torch.arange(len(labels)) % 5 != 0
    mine, its = images[training][context.rank :: 2], labels[training][context.rank :: 2]
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = context.wrap(module)
    optimizer = offload(model, torch.optim.SGD(model.parameters(), lr=0.2), staleness=2, overlap=True)
    for epoch in range(30):
        for batch in torch.randperm(700, generator=torch.Generator().manual_seed(epoch)).split(35):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(mine[batch]), its[batch]).backward()
            optimizer.step()
    optimizer.pull()
    with torch.no_grad():
        accuracy = (module(images[~training]).argmax(1) == labels[~training]).float().mean()
    assert accuracy > 0.95, f"accuracy {accuracy:.3f}"
    assert optimizer.cache_statistics.largest_lag == 2


@holds
def staleness_that_cannot_be_is_refused(context: Context) -> Any:
    model = context.wrap(mlp())
    with raises(ValueError, "staleness=-1"):
        offload(model, make_optimizer(model.parameters()), staleness=-1)

"""Scenarios of optimizers in the memory devices with 16-bit parameters and float32 master weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from optimizer_scenarios import OPTIMIZERS, STEPS, Make, loss_of, offload, wide_mlp
from scenario import Context, Scenario, assert_equal_on_all_workers, mlp, scenario
from torch import nn

NARROW_SCENARIOS: dict[str, Scenario] = {}

narrow_scenario = functools.partial(scenario, registry=NARROW_SCENARIOS)

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# 200 updates, each by gradients at 16-bit parameters: where master weights differ in their last place, a parameter
# may differ in its own, which is 2**-8 of its value in bfloat16 and 2**-11 in float16.
NARROW_TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3}


class MasterWeights:
    """The usual hand-written form in torch: the optimizer owns float32 copies; parameters are their rounding."""

    def __init__(self, make: Make, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = make(self.masters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


class MixedDtypes(nn.Module):
    """A 16-bit layer between two of float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 33), nn.Linear(300, 4)
        self.middle = nn.Linear(33, 300).to(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.first(inputs).to(self.middle.weight.dtype))
        output: torch.Tensor = self.last(torch.tanh(hidden).float())
        return output


def narrow_optimizer(context: Context, make: Make, model: Any, *, overlap: bool) -> Any:
    if not context.is_coarse:
        return MasterWeights(make, model.parameters())
    return offload(context, make(model.parameters()), model, overlap=overlap)


def run_narrow(
    context: Context, make: Make, *, module: Callable[[], nn.Module], overlap: bool, steps: int = STEPS
) -> dict[str, Any]:
    wrapped = module()
    model = context.wrap(wrapped)
    optimizer = narrow_optimizer(context, make, model, overlap=overlap)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
    # all_gather knows no 16-bit types everywhere; widening is exact.
    assert_equal_on_all_workers(context, [p.detach().float() for p in wrapped.parameters()])
    return {"parameters": [p.detach().clone() for p in wrapped.parameters()]}


for _name, _make in OPTIMIZERS.items():
    for _dtype, _overlap in (("bfloat16", False), ("float16", True)):
        NARROW_SCENARIOS[f"{_name}_{_dtype}_{'overlapped' if _overlap else 'in_step'}"] = Scenario(
            functools.partial(
                run_narrow,
                make=_make,
                module=lambda dtype=NARROW[_dtype]: wide_mlp().to(dtype),
                overlap=_overlap,
            ),
            True,
            NARROW_TOLERANCE[_dtype],
        )

for _dtype in NARROW:
    NARROW_SCENARIOS[f"mixed_with_{_dtype}"] = Scenario(
        functools.partial(
            run_narrow,
            make=OPTIMIZERS["adamw"],
            module=functools.partial(MixedDtypes, NARROW[_dtype]),
            overlap=False,
        ),
        True,
        NARROW_TOLERANCE[_dtype],
    )


@narrow_scenario(compare=False)
def narrow_training_goes_on_with_the_same_bits(context: Context) -> None:
    """From a checkpoint, whether the model or the optimizer is loaded first."""
    for dtype in NARROW.values():
        for model_first in (True, False):
            torch.manual_seed(5)
            module = MixedDtypes(dtype)
            model = context.wrap(module)
            optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-3), model)
            saved: Any = None
            for step in range(8):
                if step == 4:
                    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
                optimizer.zero_grad()
                loss_of(model, context, step).backward()
                optimizer.step()
            resumed = MixedDtypes(dtype)
            model = context.wrap(resumed)
            again = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model)
            for part in (0, 1) if model_first else (1, 0):
                (resumed, again)[part].load_state_dict(saved[part])
            dist.barrier()  # parameters are shared: everybody has loaded
            for step in range(4, 8):
                again.zero_grad()
                loss_of(model, context, step).backward()
                again.step()
            for ours, theirs in zip(resumed.parameters(), module.parameters(), strict=True):
                assert torch.equal(ours.detach(), theirs.detach())
            before, after = optimizer.state_dict()["state"], again.state_dict()["state"]
            for number, state in before.items():
                assert state.keys() == after[number].keys()
                for name, value in state.items():
                    assert torch.equal(value, after[number][name]), (number, name)


@narrow_scenario(compare=False)
def master_weights_are_saved_as_they_were_loaded(context: Context) -> None:
    """Also of an optimizer that has no other state, before the next update."""
    module = mlp().to(torch.bfloat16)
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=1e-2), model)
    assert not optimizer.state_dict()["state"]
    loss_of(model, context, 0).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert not torch.equal(saved["state"][0]["master"], module[0].weight.float())
    optimizer.load_state_dict(saved)
    again = optimizer.state_dict()["state"]
    assert all(
        torch.equal(again[number]["master"], saved["state"][number]["master"]) for number in saved["state"]
    )


@narrow_scenario(compare=False)
def narrow_state_dicts_go_both_ways(context: Context) -> None:
    module = mlp().to(torch.bfloat16)
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
    ours = optimizer.state_dict()
    first = ours["state"][0]
    assert {name: value.dtype for name, value in first.items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq", "master"), torch.float32
    )
    assert torch.equal(first["master"].bfloat16(), module[0].weight.detach())

    plain = copy.deepcopy(module)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    theirs.load_state_dict(ours)
    state = theirs.state_dict()["state"][0]
    assert state["exp_avg"].dtype is torch.bfloat16
    assert torch.equal(state["exp_avg"], first["exp_avg"].bfloat16())
    plain(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()  # the same on every worker
    theirs.step()

    saved = theirs.state_dict()
    dist.barrier()  # state is shared too: the first worker writes what it loads
    optimizer.load_state_dict(saved)
    dist.barrier()
    back = optimizer.state_dict()["state"][0]
    assert int(back["step"]) == 4
    assert torch.equal(back["exp_avg"], saved["state"][0]["exp_avg"].float())


@narrow_scenario(compare=False)
def what_is_written_to_a_narrow_parameter_stays(context: Context) -> None:
    module = mlp().to(torch.bfloat16)
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=2.0**-20), model)
    for step in range(4):
        if step == 2:
            dist.barrier()
            with torch.no_grad():
                module[0].weight.fill_(3.0)
            dist.barrier()
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
    assert bool((module[0].weight == 3.0).all())

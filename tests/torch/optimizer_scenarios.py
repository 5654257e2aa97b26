"""Scenarios of optimizers in the memory devices; torch's own classes give the expected results."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import math
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scenario import (
    Branches,
    Context,
    Scenario,
    assert_equal_on_all_workers,
    mlp,
    raises,
    scenario,
    train_in_one_backward,
)
from tiers import IS_THOROUGH
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.multiprocessing.reductions import StorageWeakRef

from coarse.torch.optim import Lion

OPTIMIZER_SCENARIOS: dict[str, Scenario] = {}

offloaded_scenario = functools.partial(scenario, registry=OPTIMIZER_SCENARIOS)

STEPS = 200 if IS_THOROUGH else 40
# float32: updates whose roundings differ by the order of a sum or a fused operation.
TOLERANCE = 2e-6

Make = Callable[[Any], torch.optim.Optimizer]


def offload(context: Context, optimizer: torch.optim.Optimizer, model: Any, **options: Any) -> Any:
    """The optimizer in the memory devices, or under torch's classes the optimizer."""
    if not context.is_coarse:
        return optimizer
    from coarse.torch import DistributedOptimizer

    distributed = DistributedOptimizer(optimizer, model, **options)
    assert distributed.runs_in_memory_devices
    return distributed


def wide_mlp() -> nn.Sequential:
    """Tensors that are gathered at once, and one of several shards."""
    return nn.Sequential(nn.Linear(8, 300), nn.GELU(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4))


def loss_of(model: Any, context: Context, step: int) -> torch.Tensor:
    """The sum of parameters of any width; the loss is float32."""
    inputs = context.inputs(step, 16, 8).to(next(model.parameters()).dtype)
    return (model(inputs) - inputs[:, :4]).float().square().mean()


def norm_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors]).norm()


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Parameters, and the optimizer's state dict with state by parameter number."""
    saved = optimizer.state_dict()
    return {
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "state": {str(key): dict(value) for key, value in saved["state"].items()},
        "settings": [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]],
    }


def run_optimizer(context: Context, make: Make, *, overlap: bool, steps: int = STEPS) -> dict[str, Any]:
    module = wide_mlp()
    model = context.wrap(module)
    optimizer = offload(context, make(model.parameters()), model, overlap=overlap)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
        scheduler.step()
    assert_equal_on_all_workers(context, module.parameters())
    return everything(module, optimizer)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.01),
    "sgd_with_momentum": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01
    ),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd_that_maximises": lambda p: torch.optim.SGD(p, lr=1e-4, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(
        p, lr=1e-2, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.1
    ),
    "lion": lambda p: Lion(p, lr=1e-4, weight_decay=0.1),
    "adamw_with_groups_of_its_own": lambda p: torch.optim.AdamW(
        [
            {"params": (parameters := list(p))[::2], "lr": 1e-3, "weight_decay": 0.1},
            {"params": parameters[1::2], "lr": 3e-3, "betas": (0.7, 0.9), "weight_decay": 0.0},
        ]
    ),
}

for _name, _make in OPTIMIZERS.items():
    for _overlap in (False, True):
        OPTIMIZER_SCENARIOS[f"{_name}_{'overlapped' if _overlap else 'in_step'}"] = Scenario(
            functools.partial(run_optimizer, make=_make, overlap=_overlap), True, TOLERANCE
        )


# ---- the model with its optimizer ----


@offloaded_scenario(compare=False)
def parameters_that_nobody_made_equal_become_the_first_workers(context: Context) -> None:
    module = mlp()
    first = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(context.rank)
    model = context.wrap(module, init_sync=False)
    offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model)
    for parameter, expected in zip(module.parameters(), first, strict=True):
        assert torch.equal(parameter, expected)


@offloaded_scenario(compare=False)
def parameters_whose_values_cannot_be_taken_over_are_told(context: Context) -> None:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model)
    module.share_memory()  # as torch.multiprocessing does to tensors that it sends
    model(context.inputs(0, 4, 8)).square().mean().backward()
    with raises(RuntimeError, "parameter 0 was torch.float32 [16, 8]", "memory of share_memory()", "clone()"):
        optimizer.step()


class AveragedWeights:
    """The class that many scripts have: weights are swapped by assigning to `.data`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._shadow = {name: p.data.clone() for name, p in module.named_parameters()}
        self._backup: dict[str, torch.Tensor] = {}

    def update(self) -> None:
        for name, parameter in self._module.named_parameters():
            self._shadow[name] = 0.9 * self._shadow[name] + 0.1 * parameter.data

    def apply(self) -> None:
        for name, parameter in self._module.named_parameters():
            self._backup[name] = parameter.data
            parameter.data = self._shadow[name]

    def restore(self) -> None:
        for name, parameter in self._module.named_parameters():
            parameter.data = self._backup[name]


def average_over_workers(context: Context, module: nn.Module) -> None:
    """As Accelerate's LocalSGD."""
    for parameter in module.parameters():
        mean = parameter.data.clone()
        dist.all_reduce(mean)
        parameter.data = mean / context.world_size


def shrink_as_one_vector(module: nn.Module) -> None:
    """As torch's model averagers write: views of one tensor become the parameters."""
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(0.5 * vector, module.parameters())


def train_with_assigned_parameters(context: Context, **options: Any) -> Any:
    """Worker 1 reads the parameters that it assigns others for when worker 0 is about to begin the next update."""
    module = wide_mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-3), model, **options)
    average = AveragedWeights(module)
    evaluations = []
    late = torch.zeros(1, device="cpu")
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, context, step)
        if context.rank == 0 and step % 3 == 0 and step:
            dist.send(late, dst=1)
        loss.backward()
        optimizer.step()
        average.update()
        if step % 3 == 1:
            average_over_workers(context, module)
        if step % 3 == 2:
            if context.rank == 1:
                dist.recv(late, src=0)
                before = nn.utils.parameters_to_vector(module.parameters()).detach()
                for _ in range(100):
                    now = nn.utils.parameters_to_vector(module.parameters()).detach()
                    assert torch.equal(now, before), (
                        "worker 0's next update changes what worker 1 still reads"
                    )
            shrink_as_one_vector(module)
        average.apply()
        with torch.no_grad():
            evaluations.append(loss_of(module, context, step))
        average.restore()
    return everything(module, optimizer), evaluations


@offloaded_scenario(tolerance=TOLERANCE)
def parameters_that_are_assigned_in_step(context: Context) -> Any:
    return train_with_assigned_parameters(context)


@offloaded_scenario(tolerance=TOLERANCE)
def parameters_that_are_assigned_overlapped(context: Context) -> Any:
    return train_with_assigned_parameters(context, overlap=True)


@offloaded_scenario(compare=False)
def a_snapshot_has_parameters_that_were_assigned(context: Context) -> None:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss_of(model, context, 0).backward()
    optimizer.step()
    module[0].weight.data = torch.full_like(module[0].weight.data, 0.25)
    optimizer.remote_parameters.take_over_writes()
    if context.rank == 0:
        with optimizer.remote_parameters.snapshot() as snapshot:
            kept = torch.frombuffer(bytearray(snapshot.read(0, 0)), dtype=torch.float32)
        assert bool((kept[: module[0].weight.numel()] == 0.25).all())
    dist.barrier()


@offloaded_scenario(compare=False)
def the_optimizer_that_was_given_makes_no_steps(context: Context) -> None:
    module = mlp()
    model = context.wrap(module)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    offload(context, given, model)  # and nobody keeps what it returns
    model(context.inputs(0, 4, 8)).square().mean().backward()
    with raises(RuntimeError, "this SGD runs in the memory devices; call step() of"):
        given.step()
    model.close()
    given.step()
    dist.barrier()


@offloaded_scenario(compare=False)
def tables_that_forward_writes_to_are_updated_by_the_workers(context: Context) -> None:
    model = context.wrap(nn.Embedding(10, 4, max_norm=1.0))
    from coarse.torch import DistributedOptimizer

    with pytest.warns(UserWarning, match="the max_norm of parameter 'weight' makes forward change it"):
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert not optimizer.runs_in_memory_devices


@offloaded_scenario(compare=False)
def unused_parameters_are_named_by_step(context: Context) -> None:
    model = context.wrap(Branches())
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(context.inputs(0, 4, 8), 0).square().mean().backward()
    with raises(RuntimeError, "find_unused_parameters=True"):
        optimizer.step()
    dist.barrier()


@offloaded_scenario(compare=False)
def modules_can_be_copied_and_pickled(context: Context) -> None:
    module = mlp()
    model = context.wrap(module)
    offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        twin.load_state_dict(module.state_dict())
        for one, other in zip(twin.parameters(), module.parameters(), strict=True):
            assert torch.equal(one, other)
            assert one.data_ptr() != other.data_ptr()
    dist.barrier()


@offloaded_scenario(compare=False)
def gradients_that_are_rounded_leave_the_optimizer_on_the_workers(context: Context) -> None:
    from coarse.torch import DistributedOptimizer

    model = context.wrap(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert not optimizer.runs_in_memory_devices
    assert "communication hook sends gradients as torch.float16" in str(warned[0].message)
    assert "COARSE_NODE_COMPRESSION=bf16, fp16 or int8" in str(warned[0].message)
    model(context.inputs(0, 4, 8)).square().mean().backward()
    optimizer.step()
    assert_equal_on_all_workers(context, model.parameters())
    other = context.wrap(mlp())
    offload(context, torch.optim.SGD(other.parameters(), lr=0.1), other)
    with raises(RuntimeError, "COARSE_NODE_COMPRESSION", "the optimizer runs on the workers"):
        other.register_comm_hook(None, default_hooks.fp16_compress_hook)


@offloaded_scenario(tolerance=TOLERANCE)
def copies_of_models_train_by_themselves(context: Context) -> Any:
    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, context, step).backward()
            optimizer.step()

    def make(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    results = []
    for overlap in (False, True):
        model = context.wrap(wide_mlp())
        optimizer = offload(context, make(model), model, overlap=overlap)
        train(model, optimizer, range(3))
        twin = copy.deepcopy(model)
        train(model, optimizer, range(3, 5))
        own = offload(context, make(twin), twin, overlap=overlap)
        train(twin, own, range(2))
        train(model, optimizer, range(5, 6))
        results += [everything(model, optimizer), everything(twin, own)]
    return results


# ---- what torch's users do around an optimizer ----


@offloaded_scenario(tolerance=TOLERANCE)
def clips_and_unscales_between_backward_and_step(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    scaler = torch.amp.GradScaler(context.device.type, init_scale=2.0**10)
    found = []
    for step in range(6):
        optimizer.zero_grad()
        factor = float("inf") if step == 2 and context.rank == 1 else 1.0
        scaler.scale(model(context.inputs(step, 4, 8)).square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1).nan_to_num(-1, -1, -1)))
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return torch.tensor(found), everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def clips_by_the_norm_of_all_gradients(context: Context) -> Any:
    module = wide_mlp()
    model = context.wrap(module)
    make = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = offload(context, make, model, max_grad_norm=0.05)
    norms = []
    for step in range(30):
        optimizer.zero_grad()
        (loss_of(model, context, step) * (1.0, 1e-3)[step % 2]).backward()
        if not context.is_coarse:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        if context.is_coarse:
            norms.append(optimizer.gradient_norm)
    assert min(norms) < 0.05 < max(norms)
    return torch.tensor(norms), everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def clips_what_was_changed_after_backward(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    make = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = offload(context, make, model, max_grad_norm=0.05)
    for step in range(5):
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8)).square().mean().backward()
        with torch.no_grad():
            if step % 2:
                module[0].weight.grad.mul_(3.0)
            else:
                module[2].bias.grad = module[2].bias.grad + 1.0
        if not context.is_coarse:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def clips_by_the_norm_of_what_was_unscaled(context: Context) -> Any:
    """By GradScaler.unscale_(), which changes gradients uncounted by torch."""
    module = mlp()
    model = context.wrap(module)
    make = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = offload(context, make, model, max_grad_norm=0.5)
    scaler = torch.amp.GradScaler(context.device.type, init_scale=2.0**10)
    norms = []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(model(context.inputs(step, 4, 8)).square().mean()).backward()
        scaler.unscale_(optimizer)
        if not context.is_coarse:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        if context.is_coarse:
            norms.append(optimizer.gradient_norm)
    return torch.tensor(norms), everything(module, optimizer)


@offloaded_scenario(compare=False)
def a_loss_scale_needs_no_pass_over_gradients_for_their_norm(context: Context) -> None:
    """GradScaler multiplies them by 1, after which memory devices' measures still hold."""
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model, max_grad_norm=0.5)
    scaler = torch.amp.GradScaler(context.device.type, init_scale=2.0**10)
    scaler.scale(model(context.inputs(0, 4, 8)).square().mean()).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("coarse.torch.gradients.averaging.measure_gradient")
        scaler.step(optimizer)
    assert optimizer.gradient_norm > 0.0


@offloaded_scenario(tolerance=TOLERANCE)
def looking_at_the_state_changes_nothing(context: Context) -> Any:
    """torch fills an optimizer without state by a step of its own, to save what it then has."""
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    for step in range(6):
        model(context.inputs(step, 4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        get_state_dict(module, optimizer)
    return everything(module, optimizer)


@offloaded_scenario(compare=False)
def hooks_of_state_dicts_are_called(context: Context) -> None:
    model = context.wrap(mlp())
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model)
    calls: list[str] = []

    def annotate(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("after saving")
        return {**state_dict, "note": 1}

    def restore(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("before loading")
        assert state_dict.pop("note") == 1
        return state_dict

    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(annotate)
    optimizer.register_load_state_dict_pre_hook(restore)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before saving", "after saving", "before loading", "after loading"]


@offloaded_scenario(tolerance=TOLERANCE)
def unscales_and_clips_within_the_update(context: Context) -> Any:
    """GradScaler without a pass for unscaling; what one worker overflows, all skip."""
    module = mlp()
    model = context.wrap(module)
    make = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = offload(context, make, model, max_grad_norm=0.05)
    scaler = torch.amp.GradScaler(context.device.type, init_scale=2.0**10, growth_interval=3)
    found = []
    for step in range(12):
        optimizer.zero_grad()
        factor = float("inf") if step == 2 and context.rank == 1 else 1.0
        scaler.scale(model(context.inputs(step, 4, 8)).square().mean() * factor).backward()
        if not context.is_coarse:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    assert len(set(found)) > 2
    return torch.tensor(found), everything(module, optimizer)


@offloaded_scenario(compare=False)
def scales_the_loss_of_a_float16_model(context: Context) -> None:
    """torch's own unscaling refuses float16 gradients; here they are unscaled in float32."""
    results = []
    for init_scale in (1.0, 2.0**8):
        torch.manual_seed(7)
        module = mlp().half()
        model = context.wrap(module)
        make = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = offload(context, make, model, max_grad_norm=10.0)
        scaler = torch.amp.GradScaler(context.device.type, init_scale=init_scale)
        for step in range(6):
            optimizer.zero_grad()
            factor = 1e9 if step == 3 and context.rank == 0 else 1.0
            output = model(context.inputs(step, 4, 8).half())
            scaler.scale(output.float().square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == init_scale / 2  # the fourth step overflowed, on all workers
        assert_equal_on_all_workers(context, [p.detach().float() for p in module.parameters()])
        results.append([p.detach().float() for p in module.parameters()])
    for plain, scaled in zip(*results, strict=True):
        torch.testing.assert_close(plain, scaled, rtol=1e-2, atol=1e-3)


@offloaded_scenario(compare=False)
def nonfinite_gradients_raise_and_name_the_worker(context: Context) -> None:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model, on_nonfinite="raise")
    for step in range(4):
        before = copy.deepcopy(module.state_dict())
        optimizer.zero_grad()
        handle = module[2].bias.register_hook(
            lambda g, step=step: g * float("nan") if step == 2 and context.rank == 1 else g
        )
        model(context.inputs(step, 4, 8)).square().mean().backward()
        handle.remove()
        if step == 2:
            with raises("NonFiniteGradientError", "worker 1 contributed NaN or Inf", "'2.bias'"):
                optimizer.step()
            for name, value in module.state_dict().items():
                assert torch.equal(value, before[name])
        else:
            optimizer.step()
    assert int(optimizer.state_dict()["state"][0]["step"]) == 3
    assert_equal_on_all_workers(context, module.parameters())


@offloaded_scenario(compare=False)
def nonfinite_gradients_are_skipped_by_all(context: Context) -> None:
    module = mlp().bfloat16()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model, on_nonfinite="skip")
    for step in range(4):
        before = copy.deepcopy(module.state_dict())
        optimizer.zero_grad()
        loss = loss_of(model, context, step)
        (loss * float("inf") if step == 1 and context.rank == 0 else loss).backward()
        optimizer.step()
        for name, value in module.state_dict().items():
            assert bool(value.isfinite().all())
            assert torch.equal(value, before[name]) == (step == 1), (step, name)
        assert math.isfinite(optimizer.gradient_norm) == (step != 1)
    assert int(optimizer.state_dict()["state"][0]["step"]) == 3


@offloaded_scenario(compare=False)
def policies_hold_on_the_workers_too(context: Context) -> None:
    from coarse.torch import DistributedOptimizer

    module = mlp()
    model = context.wrap(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = DistributedOptimizer(
            torch.optim.RMSprop(model.parameters(), lr=1e-2), model, max_grad_norm=0.01, on_nonfinite="raise"
        )
    model(context.inputs(0, 4, 8)).square().mean().backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in module.parameters()]))
    optimizer.step()
    assert abs(optimizer.gradient_norm - expected) < 1e-5 * expected
    assert float(nn.utils.get_total_norm([p.grad for p in module.parameters()])) < 0.0101
    optimizer.zero_grad()
    (model(context.inputs(0, 4, 8)).sum() * float("nan")).backward()
    with raises("NonFiniteGradientError", "averaged over all workers, is not finite"):
        optimizer.step()


def accumulate(context: Context, *, overlap: bool) -> Any:
    module = mlp()
    model = context.wrap(module)
    make = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = offload(context, make, model, overlap=overlap)
    for step in range(0, 12, 3):
        with model.no_sync():
            for micro in range(2):
                model(context.inputs(step + micro, 4, 8)).square().mean().backward()
        model(context.inputs(step + 2, 4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def accumulates_gradients_in_step(context: Context) -> Any:
    return accumulate(context, overlap=False)


@offloaded_scenario(tolerance=TOLERANCE)
def accumulates_gradients_overlapped(context: Context) -> Any:
    return accumulate(context, overlap=True)


def use_branches(context: Context, *, overlap: bool) -> Any:
    """Each parameter counts its own updates, and an unused one keeps its value and state."""
    module = Branches()
    model = context.wrap(module, find_unused_parameters=True)
    optimizer = offload(
        context, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), model, overlap=overlap
    )
    for step in range(9):
        optimizer.zero_grad()
        # Both heads, then one, then different ones on different workers.
        head = (step % 2, 0, (step + context.rank) % 2)[step % 3]
        model(context.inputs(step, 4, 8), head).square().mean().backward()
        optimizer.step()
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def leaves_unused_parameters_alone_in_step(context: Context) -> Any:
    return use_branches(context, overlap=False)


@offloaded_scenario(tolerance=TOLERANCE)
def leaves_unused_parameters_alone_overlapped(context: Context) -> Any:
    return use_branches(context, overlap=True)


@offloaded_scenario(tolerance=TOLERANCE)
def a_penalty_on_the_gradient_of_inputs_overlapped(context: Context) -> Any:
    """An update is prepared once, however many backward passes a forward has."""
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model, overlap=True)
    for step in range(3):
        optimizer.zero_grad()
        inputs = context.inputs(step, 4, 8).requires_grad_()
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        (output.square().mean() + slope.square().mean()).backward()
        optimizer.step()
    return everything(module, optimizer)


class Terms(nn.Module):
    """A sum of terms with a large weight each; the caller chooses which ones take part."""

    def __init__(self, num_terms: int, num_elements: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(num_elements, generator=generator)) for _ in range(num_terms)
        )

    def forward(self, inputs: torch.Tensor, terms: Iterable[int]) -> torch.Tensor:
        return torch.stack([(self.weights[term] * inputs).square().mean() for term in terms]).sum()


@offloaded_scenario(tolerance=TOLERANCE)
def large_parameters_that_a_worker_leaves_out_overlapped(context: Context) -> Any:
    """Gradients take turns in their slots, also where those that one worker has meet what another has none for."""
    num_terms, num_elements = 16, 1 << 19
    module = Terms(num_terms, num_elements)
    model = context.wrap(module, find_unused_parameters=True)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model, overlap=True)
    terms = [term for term in range(num_terms) if context.rank == 0 or term // 2 % 2]
    for step in range(4):
        optimizer.zero_grad()
        inputs = context.inputs(step, 1, num_elements)[0]
        model(inputs, terms).backward()
        optimizer.step()
    return [weight.detach()[::101].clone() for weight in module.weights]


def clamp_weights(context: Context, *, overlap: bool) -> Any:
    """Training continues with values that are written to parameters between two steps."""
    module = wide_mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model, overlap=overlap)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
        if step % 3 == 0:
            with torch.no_grad():
                for parameter in list(module.parameters())[::2]:
                    parameter.clamp_(-0.02, 0.02)
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def clamps_weights_in_step(context: Context) -> Any:
    return clamp_weights(context, overlap=False)


@offloaded_scenario(tolerance=TOLERANCE)
def clamps_weights_overlapped(context: Context) -> Any:
    return clamp_weights(context, overlap=True)


def evaluate_average(context: Context, *, overlap: bool) -> Any:
    """As averages of weights are used: store, copy_to, evaluate, restore; one worker is through before the other."""
    module = wide_mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model, overlap=overlap)
    parameters = list(module.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
        torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 0.3)
        stored = [parameter.detach().clone() for parameter in parameters]
        for parameter, value in zip(parameters, average, strict=True):
            parameter.data.copy_(value)
        dist.barrier()
        if context.rank == step % 2:
            dist.barrier()
        losses.append(loss_of(module, context, step).detach())
        for parameter, value in zip(parameters, stored, strict=True):
            parameter.data.copy_(value)
        if context.rank != step % 2:
            dist.barrier()
    return losses, everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def averages_are_evaluated_by_each_worker_for_itself_in_step(context: Context) -> Any:
    return evaluate_average(context, overlap=False)


@offloaded_scenario(tolerance=TOLERANCE)
def averages_are_evaluated_by_each_worker_for_itself_overlapped(context: Context) -> Any:
    return evaluate_average(context, overlap=True)


def load_late(context: Context, *, overlap: bool) -> Any:
    """Other workers see loaded or scaled values only after doing the same; then training continues with them."""
    module = wide_mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model, overlap=overlap)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
        if context.rank == 0:
            dist.barrier()
        if step == 2:
            module.load_state_dict(start)
        elif step % 2:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(0.9)
        if context.rank == 1:
            seen.append(norm_of(parameter.detach() for parameter in module.parameters()))
            dist.barrier()
        if context.rank == 0:
            seen.append(norm_of(parameter.detach() for parameter in module.parameters()))
    return seen, everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def what_every_worker_writes_counts_once_in_step(context: Context) -> Any:
    return load_late(context, overlap=False)


@offloaded_scenario(tolerance=TOLERANCE)
def what_every_worker_writes_counts_once_overlapped(context: Context) -> Any:
    return load_late(context, overlap=True)


def clamp_in_place(parameter: torch.Tensor) -> None:
    parameter.data.clamp_(-0.02, 0.02)


@offloaded_scenario(compare=False)
def parameters_that_are_written_during_their_update_are_told(context: Context) -> None:
    """A private page would hide the update, from this worker and then from all."""
    module = wide_mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
    loss_of(model, context, 0).backward()
    optimizer.step()
    module[0].weight.register_post_accumulate_grad_hook(clamp_in_place)
    with raises(RuntimeError, "parameter 0 of shape (300, 8)", "while memory devices updated it", "hook"):
        loss_of(model, context, 1).backward()
    dist.barrier()


class Parallel(nn.Module):
    """Layers side by side, whose gradients come in the reverse of the order in which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, width) for width in (300, 20, 300, 70, 150, 300))

    def forward(self, inputs: torch.Tensor, order: list[int]) -> torch.Tensor:
        return torch.stack([self.layers[i](inputs).square().mean() for i in order]).sum()


@offloaded_scenario(tolerance=TOLERANCE)
def gradients_that_take_turns_come_in_any_order(context: Context) -> Any:
    module = Parallel()
    model = context.wrap(module)
    make = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = offload(context, make, model, overlap=True)
    for step in range(10):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(10 * step + context.rank))
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8), order.tolist()).backward()
        optimizer.step()
        assert not context.is_coarse or all(p.grad is None for p in module.parameters())
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def gradients_in_memory_of_their_own(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module, gradient_as_bucket_view=False)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    for step in range(5):
        optimizer.zero_grad(set_to_none=False)
        model(context.inputs(step, 4, 8)).square().mean().backward()
        optimizer.step()
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def strided_parameters(context: Context) -> Any:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    module = module.to(memory_format=torch.channels_last)
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.Adam(model.parameters(), lr=1e-2), model)
    for step in range(5):
        optimizer.zero_grad()
        model(context.inputs(step, 2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def schedulers_and_hooks_of_the_optimizer_that_was_given(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    called: list[str] = []
    given.register_step_pre_hook(lambda optimizer, args, kwargs: called.append("before"))
    given.register_step_post_hook(lambda optimizer, args, kwargs: called.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
    optimizer = offload(context, given, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            optimizer.zero_grad()
            model(context.inputs(step, 4, 8)).square().mean().backward()
            optimizer.step()
            scheduler.step()
    assert called == ["before", "after"] * 3
    return everything(module, optimizer)


def _cleared(optimizer: Any) -> None:
    optimizer.state.clear()


def _without_one(optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][1])


def _in_place(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        for value in optimizer.state[parameter].values():
            if torch.is_tensor(value) and value.ndim:
                value.mul_(0.5)


def _other_values(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        state = optimizer.state[parameter]
        for name, value in list(state.items()):
            if torch.is_tensor(value) and value.ndim:
                state[name] = torch.full_like(value, 0.25)


def train_with_changed_state(context: Context, make: Make, *, overlap: bool = False) -> Any:
    """As ReLoRA, warm restarts, Lookahead and pruning do: what is done to `optimizer.state` counts."""
    found = []
    for change in (_cleared, _without_one, _in_place, _other_values):
        module = mlp()
        model = context.wrap(module)
        optimizer = offload(context, make(model.parameters()), model, overlap=overlap)
        found.append([dict(optimizer.state[parameter]) for parameter in module.parameters()])  # none yet
        for step in range(4):
            if step == 2:
                change(optimizer)
            optimizer.zero_grad()
            loss_of(model, context, step).backward()
            optimizer.step()
        found.append(everything(module, optimizer))
    return found


@offloaded_scenario(tolerance=TOLERANCE)
def changes_of_the_state_count_in_step(context: Context) -> Any:
    return train_with_changed_state(context, lambda p: torch.optim.Adam(p, lr=1e-2))


@offloaded_scenario(tolerance=TOLERANCE)
def changes_of_the_state_count_overlapped(context: Context) -> Any:
    return train_with_changed_state(
        context, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), overlap=True
    )


@offloaded_scenario(compare=False)
def state_that_memory_devices_cannot_keep_is_refused(context: Context) -> None:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.Adam(model.parameters(), lr=1e-2), model)
    loss_of(model, context, 0).backward()
    optimizer.state[next(module.parameters())]["slow_weights"] = torch.zeros(1)
    with raises(RuntimeError, "'slow_weights'", "cannot keep", "exp_avg"):
        optimizer.step()
    model.close()


class WithEmptyParameters(nn.Module):
    """Parameters without elements among others, as in a LoRA of rank 0; one is left out of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.layer = nn.Linear(8, 4)
        self.left_out = nn.Parameter(torch.empty(2, 0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + self.empty.sum()


def train_with_empty_parameters(context: Context, make: Make, *, overlap: bool) -> Any:
    """They have state as under torch's optimizers, from the first gradient on, and it can be loaded."""
    module = WithEmptyParameters()
    model = context.wrap(module, find_unused_parameters=True)
    optimizer = offload(context, make(model.parameters()), model, overlap=overlap)
    saved = []
    for step in range(5):
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8)).square().mean().backward()
        optimizer.step()
        saved.append(copy.deepcopy(optimizer.state_dict()))
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def empty_parameters_have_state_in_step(context: Context) -> Any:
    return train_with_empty_parameters(
        context, lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True), overlap=False
    )


@offloaded_scenario(tolerance=TOLERANCE)
def empty_parameters_have_state_overlapped(context: Context) -> Any:
    return train_with_empty_parameters(
        context, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), overlap=True
    )


# ---- state dicts ----


def moved_through(context: Context, make: Make) -> Any:
    """Five steps on the workers, five in memory devices, five on the workers, with a state dict in between."""
    module = mlp()
    model = context.wrap(module)
    saved: dict[str, Any] = {}
    optimizer: Any = None
    for part in range(3):
        optimizer = make(model.parameters())
        if part == 1:
            optimizer = offload(context, optimizer, model)
        if saved:
            optimizer.load_state_dict(saved)
        for step in range(5):
            optimizer.zero_grad()
            model(context.inputs(10 * part + step, 4, 8)).square().mean().backward()
            optimizer.step()
        saved = optimizer.state_dict()
        if part == 1 and context.is_coarse:
            # Workers that update on their own need parameters of their own.
            model.close()
            model = context.wrap(module)
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def state_dicts_of_adamw_go_both_ways(context: Context) -> Any:
    return moved_through(context, lambda p: torch.optim.AdamW(p, lr=1e-2))


@offloaded_scenario(tolerance=TOLERANCE)
def state_dicts_of_sgd_go_both_ways(context: Context) -> Any:
    return moved_through(context, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5))


@offloaded_scenario(tolerance=TOLERANCE)
def takes_over_an_optimizer_that_has_state(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(10):
        if step == 5:
            optimizer = offload(context, optimizer, model)
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8)).square().mean().backward()
        optimizer.step()
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def loading_an_old_state_forgets_the_newer_one(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    empty = optimizer.state_dict()
    for step in range(6):
        if step == 3:
            optimizer.load_state_dict(empty)
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8)).square().mean().backward()
        optimizer.step()
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def loading_nothing_forgets_what_was_taken_over(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    empty = optimizer.state_dict()
    for step in range(6):
        if step == 3:
            optimizer = offload(context, optimizer, model)
            optimizer.load_state_dict(empty)
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8)).square().mean().backward()
        optimizer.step()
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def unsupported_optimizers_run_on_the_workers_and_say_so(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    optimizer: Any = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    if context.is_coarse:
        from coarse.torch import DistributedOptimizer

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = DistributedOptimizer(optimizer, model)
        assert [str(w.message) for w in caught] == [
            "RMSprop runs on the workers, not in the memory devices: they support SGD, Adam, AdamW, Adagrad and "
            "SparseAdam of torch.optim, and coarse.torch.optim.Lion, not RMSprop"
        ]
        assert not optimizer.runs_in_memory_devices
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(context.inputs(step, 4, 8)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return everything(module, optimizer)


@offloaded_scenario(tolerance=TOLERANCE)
def closures_are_called_before_the_update(context: Context) -> Any:
    results = []
    for options in ({}, {"overlap": True}, {"max_grad_norm": 1e6}):
        module = mlp()
        model = context.wrap(module)
        own = options if context.is_coarse else {}
        optimizer: Any = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model, **own)
        for step in range(4):

            def closure(step: int = step, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(context.inputs(step, 4, 8)).square().mean()
                loss.backward()
                return loss

            with torch.no_grad():
                results.append(optimizer.step(closure).detach())
        results.append(everything(module, optimizer))
    return results


@offloaded_scenario(tolerance=TOLERANCE)
def state_that_is_assigned(context: Context) -> Any:
    results = []
    for kind in (torch.optim.Adam, torch.optim.RMSprop):  # the latter on the workers
        module = mlp()
        model = context.wrap(module)
        optimizer: Any = kind(model.parameters(), lr=0.01)
        if context.is_coarse:
            from coarse.torch import DistributedOptimizer

            optimizer = DistributedOptimizer(optimizer, model)
        for step in range(6):
            optimizer.zero_grad()
            model(context.inputs(step, 4, 8)).square().mean().backward()
            optimizer.step()
            if step == 1:
                kept = {p: copy.deepcopy(dict(state)) for p, state in optimizer.state.items()}
                optimizer.state = collections.defaultdict(dict)
            if step == 3:
                optimizer.state = collections.defaultdict(dict, kept)
        results.append(everything(module, optimizer))
    return results


# ---- what only COARSE promises ----


@offloaded_scenario(compare=False)
def overlapping_changes_no_bit(context: Context) -> None:
    for make in OPTIMIZERS.values():
        results = []
        for overlap in (False, True):
            torch.manual_seed(3)
            results.append(run_optimizer(context, make, overlap=overlap, steps=20))
        first, second = results
        for ours, theirs in zip(first["parameters"], second["parameters"], strict=True):
            assert torch.equal(ours, theirs)
        for key, state in first["state"].items():
            for name, value in state.items():
                assert torch.equal(value, second["state"][key][name]), (key, name)


def coarse_mappings() -> set[str]:
    """The lines of /proc/self/maps that are of COARSE's memory; models of scenarios before may still have some."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:coarse-" in line}


@offloaded_scenario(compare=False)
def parameters_and_state_live_once(context: Context) -> None:
    mapped_before = coarse_mappings()
    module = wide_mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters()), model)
    loss_of(model, context, 0).backward()
    optimizer.step()
    mapped = coarse_mappings() - mapped_before
    # Two views of one memory: as all see it, and as this worker does.
    parameters = [mapping.split() for mapping in mapped if "coarse-parameters of model" in mapping]
    assert sorted(access for _, access, *_ in parameters) in (["rw-p", "rw-s"], ["rw-s"]), mapped
    assert len({inode for _, _, _, _, inode, *_ in parameters}) == 1, mapped
    assert not any("coarse-states" in mapping for mapping in mapped), mapped
    dist.barrier()
    if context.rank == 0:
        with torch.no_grad():
            module[0].weight.fill_(7.0)
    dist.barrier()
    assert bool((module[0].weight == 7.0).all()) == (context.rank == 0 or len(parameters) == 1)
    dist.barrier()


@offloaded_scenario(compare=False)
def what_was_dropped_is_freed_when_the_next_model_comes(context: Context) -> None:
    mapped_before = coarse_mappings()
    for overlap in (False, True):
        module = wide_mlp()
        model = context.wrap(module)
        optimizer = offload(context, torch.optim.AdamW(model.parameters()), model, overlap=overlap)
        loss_of(model, context, 0).backward()
        optimizer.step()
        assert any("coarse-parameters of model" in mapping for mapping in coarse_mappings() - mapped_before)
        dropped = weakref.ref(model)
        del module, model, optimizer
        gc.collect()
        assert dropped() is None
        context.wrap(mlp())
        gc.collect()
        left = coarse_mappings() - mapped_before
        assert not any("coarse-parameters of model" in mapping for mapping in left), left


@offloaded_scenario(compare=False)
def what_the_wrapper_registered_is_freed_at_once(context: Context) -> None:
    """Without the garbage collector: slots of the wrapper and a worker's own parameters."""
    gc.collect()
    gc.disable()
    try:
        for overlap in (False, True):
            mapped_before = coarse_mappings()
            module = wide_mlp()
            expected = [parameter.detach().clone() for parameter in module.parameters()]
            own = [StorageWeakRef(parameter.untyped_storage()) for parameter in module.parameters()]
            model = context.wrap(module)
            wrapped = coarse_mappings() - mapped_before
            optimizer = offload(context, torch.optim.AdamW(model.parameters()), model, overlap=overlap)
            left = wrapped & coarse_mappings()
            assert wrapped
            assert not any("coarse-gradients of" in mapping for mapping in left), left
            assert all(storage.expired() for storage in own)
            for parameter, value in zip(module.parameters(), expected, strict=True):
                assert torch.equal(parameter.detach(), value)
            loss_of(model, context, 0).backward()
            optimizer.step()
            model.close()
    finally:
        gc.enable()


@offloaded_scenario(compare=False)
def closing_gives_every_worker_parameters_of_its_own(context: Context) -> None:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    if context.rank == 0:
        model.close()
    else:
        del model, optimizer
        gc.collect()
    dist.barrier()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(context.rank + 1)
    dist.barrier()
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter.detach(), value + (context.rank + 1))


@offloaded_scenario(compare=False)
def nobody_sees_half_a_parameter_between_steps(context: Context) -> None:
    """A thread reads continuously; values that it read while no step() ran belong to one version.

    Every element starts at 0 and every gradient is 1, so that after k steps of learning rate 1 all are -k.
    """
    module = nn.Linear(1000, 300, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=1.0), model)
    state = {"steps_begun": 0, "steps_done": 0, "reads": 0, "torn": 0, "stop": False}

    def read() -> None:
        while not state["stop"]:
            done = state["steps_done"]
            copy = module.weight.detach().clone()
            if state["steps_begun"] == done:  # none began meanwhile
                state["reads"] += 1
                state["torn"] += not bool((copy == -done).all())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(1000):
            optimizer.zero_grad()
            model(torch.ones(1, 1000)).sum().backward()
            seen, patience = state["reads"], 0
            # Give the reader a turn between two steps, on some of the workers some of the time.
            while (step + context.rank) % 2 and state["reads"] == seen and patience < 10_000_000:
                patience += 1
            state["steps_begun"] += 1
            optimizer.step()
            state["steps_done"] += 1
            enough = torch.tensor([float(step >= 30 and state["reads"] >= 30)])
            dist.all_reduce(enough, op=dist.ReduceOp.MIN)
            if enough.item():
                break
    finally:
        state["stop"] = True
        reader.join()
    assert state["torn"] == 0, state
    assert state["reads"] >= 30, state


@offloaded_scenario(compare=False)
def a_graph_from_before_the_update_is_refused(context: Context) -> None:
    for overlap in (False, True):
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model = context.wrap(module)
        optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=overlap)
        loss = model(context.inputs(0, 4, 8)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with raises(RuntimeError, "modified by an inplace operation"):
            loss.backward()


@offloaded_scenario(compare=False)
def updates_by_gradients_of_one_worker_are_told_once(context: Context) -> None:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model)

    def warnings_of(step: Callable[[], Any]) -> list[str]:
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
            optimizer.step()
        return [str(each.message) for each in caught if "did not average" in str(each.message)]

    def accumulate_and_average() -> None:
        with model.no_sync():
            loss_of(model, context, 0).backward()
        loss_of(model, context, 1).backward()

    def average_by_hand() -> None:
        loss_of(module, context, 0).backward()
        model.average_gradients()

    def second_backward() -> None:
        loss = loss_of(model, context, 0)
        loss.backward(retain_graph=True)
        loss.backward()

    for right in (lambda: loss_of(model, context, 0).backward(), accumulate_and_average, average_by_hand):
        assert warnings_of(right) == []
    assert len(warnings_of(second_backward)) == 1
    assert warnings_of(lambda: loss_of(module, context, 0).backward()) == []  # it was told
    other = mlp()
    model, optimizer = context.wrap(other), None
    optimizer = offload(context, torch.optim.SGD(other.parameters(), lr=0.1), model)
    assert len(warnings_of(lambda: loss_of(other, context, 0).backward())) == 1


@offloaded_scenario(compare=False)
def what_cannot_be_offloaded_is_refused(context: Context) -> None:
    from coarse.torch import DistributedOptimizer

    module = mlp()
    model = context.wrap(module)
    with raises(TypeError, "wrapped by coarse.torch.DistributedDataParallel"):
        DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), module)
    with raises(TypeError, "the model that torch.compile was given"):
        DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), torch.compile(model))
    with raises(TypeError, "one of torch's optimizers, not a list"):
        DistributedOptimizer(list(module.parameters()), model)
    with raises(ValueError, "overlap=False"):
        DistributedOptimizer(torch.optim.Adam(module.parameters()), model, overlap=True, max_grad_norm=1.0)
    with raises(ValueError, "max_grad_norm=0"):
        DistributedOptimizer(torch.optim.Adam(module.parameters()), model, max_grad_norm=0)
    with raises(ValueError, "'stop' is none of ignore, raise, skip"):
        DistributedOptimizer(torch.optim.Adam(module.parameters()), model, on_nonfinite="stop")
    with raises(ValueError, "capturable=True", "without capturable"):
        DistributedOptimizer(torch.optim.Adam(module.parameters(), capturable=True), model)
    halves = [{"params": list(module.parameters())[i::2], "amsgrad": bool(i)} for i in range(2)]
    with raises(ValueError, "amsgrad in some parameter groups"):
        DistributedOptimizer(torch.optim.Adam(halves), model)
    foreign = nn.Parameter(torch.zeros(3))
    with raises(ValueError, "has 1 trainable parameter(s)"):
        DistributedOptimizer(torch.optim.SGD([*module.parameters(), foreign], lr=0.1), model)
    optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), model)
    with raises(RuntimeError, "cannot get a second DistributedOptimizer"):
        DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), model)
    optimizer.param_groups[0]["momentum"] = 0.9
    with raises(ValueError, "had no momentum"):
        optimizer.step()


@offloaded_scenario(compare=False)
def two_models_of_overlapped_updates_end_in_any_order(context: Context) -> None:
    trained = []
    for reverses in (False, True):
        torch.manual_seed(0)
        models = [context.wrap(wide_mlp()) for _ in range(2)]
        optimizers = [
            offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
            for model in models
        ]
        trained.append(
            train_in_one_backward(
                context,
                models,
                optimizers,
                reverses=reverses,
                inputs=lambda step: (context.inputs(step, 4, 8),),
            )
        )
    assert all(map(torch.equal, *trained))
    assert_equal_on_all_workers(context, trained[1])


@offloaded_scenario(tolerance=TOLERANCE)
def updates_by_gradients_that_were_averaged_by_hand(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync() if context.is_coarse else contextlib.nullcontext():
            loss_of(model, context, step).backward()
        if context.is_coarse:
            model.average_gradients()
        optimizer.step()
    return everything(module, optimizer)


@offloaded_scenario(compare=False)
def gradients_that_backward_uses_up_are_not_averaged_by_hand(context: Context) -> None:
    model = context.wrap(mlp())
    offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
    with raises(RuntimeError, "average_gradients() cannot be used with overlap=True", "overlap=False"):
        model.average_gradients()


@offloaded_scenario(compare=False)
def overlapped_steps_without_an_averaging_backward_are_refused(context: Context) -> None:
    model = context.wrap(mlp())
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
    with model.no_sync():
        model(context.inputs(0, 4, 8)).sum().backward()
    with raises(RuntimeError, "no_sync", "overlap=False"):
        optimizer.step()


@offloaded_scenario(compare=False)
def state_dicts_of_dcp_before_an_overlapped_step_are_refused_by_name(context: Context) -> None:
    """It makes gradients of zeros, and takes a step by them."""
    model = context.wrap(mlp())
    optimizer = offload(
        context, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, overlap=True
    )
    with raises(RuntimeError, "torch.distributed.checkpoint", "overlap=False"):
        get_state_dict(model, optimizer)


@offloaded_scenario(compare=False)
def thawed_parameters_without_a_forward_of_the_wrapper_are_refused(context: Context) -> None:
    for overlap in (False, True):
        module = mlp()
        module[0].bias.requires_grad_(False)
        model = context.wrap(module)
        optimizer = offload(context, torch.optim.SGD(module.parameters(), lr=0.1), model, overlap=overlap)
        loss_of(model, context, 0).backward()
        optimizer.step()
        module[0].bias.requires_grad_(True)
        optimizer.zero_grad()
        loss_of(module, context, 1).backward()
        with raises(RuntimeError, "'0.bias' has a gradient", "Call the model itself, not model.module"):
            optimizer.step()
        model.close()


@offloaded_scenario(compare=False)
def overlapped_updates_by_a_scaled_loss_are_refused(context: Context) -> None:
    model = context.wrap(mlp())
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
    for enabled in (False, True):
        scaler = torch.amp.GradScaler(context.device.type, enabled=enabled)
        scaler.scale(model(context.inputs(0, 4, 8)).sum()).backward()
        if enabled:
            with raises(RuntimeError, "gradients of the scaled loss", "overlap=False"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)


@offloaded_scenario(compare=False)
def what_needs_gradients_after_an_overlapped_update_is_refused(context: Context) -> None:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
    for step in range(2):
        loss_of(model, context, step).backward()
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            with raises(RuntimeError, "no gradient exists to clip", "max_grad_norm=", "overlap=False"):
                clip(model.parameters(), 1.0)
        scaler = torch.amp.GradScaler(context.device.type)
        scaler.scale(torch.ones((), device=context.device))
        with raises(RuntimeError, "no gradient exists to clip, scale", "overlap=False"):
            scaler.unscale_(optimizer)
        assert all(p.grad.shape == p.shape and "used up" in repr(p.grad) for p in module.parameters())
        assert all(p.grad is None for p in copy.deepcopy(module).parameters())
        module.to(context.device)  # as the clean-up after an exception does
        optimizer.step()
        assert all(p.grad is None for p in module.parameters())
    loss_of(model, context, 2).backward()
    model.close()
    assert all(p.grad is None for p in module.parameters())


@offloaded_scenario(compare=False)
def a_schedule_that_the_loop_forgets_is_told(context: Context) -> None:
    """Recovery steps it after a worker's restart, and never otherwise."""
    from coarse.torch import Recovery

    for is_stepped in (True, False):
        model = context.wrap(mlp())
        optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        Recovery(model, optimizer, state={"schedule": schedule}, on_resume=schedule.step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(6):
                loss_of(model, context, step).backward()
                optimizer.step()
                if is_stepped:
                    schedule.step()
        told = [
            str(each.message) for each in caught if "the learning rate does not change" in str(each.message)
        ]
        assert len(told) == (not is_stepped), caught
        model.close()


@offloaded_scenario(compare=False)
def two_overlapped_updates_without_a_step_are_refused(context: Context) -> None:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
    for _ in range(2):
        loss_of(model, context, 0).backward()
        optimizer.step()
    loss_of(model, context, 1).backward()
    before = [parameter.clone() for parameter in module.parameters()]
    with raises(RuntimeError, "no step() followed the last one", "no_sync", "model.module", "overlap=False"):
        loss_of(model, context, 2).backward()
    for parameter, value in zip(module.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, value, rtol=0, atol=0)
    assert_equal_on_all_workers(context, module.parameters())


class ReadsDetached(nn.Module):
    """Its backward needs the second weight again when the gradient of that weight is already complete."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs) @ self.second.weight.detach())


@offloaded_scenario(compare=False)
def a_weight_that_backward_needs_after_its_overlapped_update_is_refused(context: Context) -> None:
    model = context.wrap(ReadsDetached())
    offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
    with raises(RuntimeError, "modified by an inplace operation"):
        model(context.inputs(0, 4, 8)).sum().backward()


@offloaded_scenario(compare=False)
def other_dtypes_run_on_the_workers(context: Context) -> None:
    from coarse.torch import DistributedOptimizer

    module = mlp().double()
    model = context.wrap(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert len(caught) == 1
    assert "they update only float32, bfloat16, float16" in str(caught[0].message)
    model(context.inputs(0, 4, 8).double()).sum().backward()
    optimizer.step()
    assert_equal_on_all_workers(context, module.parameters())

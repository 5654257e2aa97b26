"""Scenarios of several optimizers for one model, and of parameters added to an already wrapped optimizer."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from optimizer_scenarios import TOLERANCE, everything, loss_of, offload, wide_mlp
from scenario import Context, Scenario, assert_equal_on_all_workers, mlp, raises, scenario
from torch import nn

PARTS_SCENARIOS: dict[str, Scenario] = {}

parts_scenario = functools.partial(scenario, registry=PARTS_SCENARIOS)


def parameters_of(module: nn.Module, *, matrices: bool) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if (parameter.dim() > 1) == matrices]


def both_states(module: nn.Module, optimizers: Sequence[Any]) -> list[Any]:
    return [everything(module, optimizer) for optimizer in optimizers]


# ---- several optimizers ----


def train_with_two_optimizers(context: Context, *, overlap: bool) -> Any:
    module = wide_mlp()
    model = context.wrap(module)
    matrices, vectors = (parameters_of(module, matrices=each) for each in (True, False))
    optimizers = [
        offload(context, torch.optim.AdamW(matrices, lr=1e-3), model, overlap=overlap),
        offload(context, torch.optim.SGD(vectors, lr=0.05, momentum=0.9), model, overlap=overlap),
    ]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, context, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        schedule.step()
    assert_equal_on_all_workers(context, module.parameters())
    return both_states(module, optimizers)


@parts_scenario(tolerance=TOLERANCE)
def two_optimizers_in_step(context: Context) -> Any:
    return train_with_two_optimizers(context, overlap=False)


@parts_scenario(tolerance=TOLERANCE)
def two_optimizers_overlapped(context: Context) -> Any:
    return train_with_two_optimizers(context, overlap=True)


@parts_scenario(tolerance=TOLERANCE)
def an_optimizer_on_the_workers_beside_one_in_memory_devices(context: Context) -> Any:
    module = wide_mlp()
    model = context.wrap(module)
    optimizers = [
        offload(context, torch.optim.AdamW(parameters_of(module, matrices=True), lr=1e-3), model),
        torch.optim.RMSprop(parameters_of(module, matrices=False), lr=1e-3),
    ]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, context, 2 * step).backward()
        loss_of(model, context, 2 * step + 1).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
    return both_states(module, optimizers)


@parts_scenario(tolerance=TOLERANCE)
def each_of_two_optimizers_clips_by_its_own_norm(context: Context) -> Any:
    module = wide_mlp()
    model = context.wrap(module)
    groups = [parameters_of(module, matrices=each) for each in (True, False)]
    optimizers = [
        offload(context, torch.optim.SGD(group, lr=0.1), model, max_grad_norm=0.1) for group in groups
    ]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, context, step).backward()
        for group, optimizer in zip(groups, optimizers, strict=True):
            if not context.is_coarse:
                nn.utils.clip_grad_norm_(group, 0.1)
            optimizer.step()
    return both_states(module, optimizers)


class Adversaries(nn.Module):
    """A generator and a discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = wide_mlp(), mlp()

    def forward(self, x: torch.Tensor, *, generates: bool) -> torch.Tensor:
        if not generates:
            with torch.no_grad():
                made = self.generator(x)
            return self.discriminator(torch.cat([made, made], 1))
        made = self.generator(x)
        return self.discriminator(torch.cat([made, made], 1))


def train_adversaries(context: Context, *, overlap: bool) -> Any:
    """Each loss is for one optimizer; the generator's loss goes through the frozen discriminator."""
    module = Adversaries()
    model = context.wrap(module, find_unused_parameters=True)
    optimizers = {
        True: offload(
            context, torch.optim.Adam(module.generator.parameters(), lr=1e-3), model, overlap=overlap
        ),
        False: offload(
            context, torch.optim.SGD(module.discriminator.parameters(), lr=0.01), model, overlap=overlap
        ),
    }
    for step in range(8):
        generates = step % 2 == 1
        module.discriminator.requires_grad_(not generates)
        optimizers[generates].zero_grad()
        output = model(context.inputs(step, 16, 8), generates=generates)
        (output.mean() if generates else output.square().mean()).backward()
        optimizers[generates].step()
    return both_states(module, list(optimizers.values()))


@parts_scenario(tolerance=TOLERANCE)
def adversaries_of_one_model_in_step(context: Context) -> Any:
    return train_adversaries(context, overlap=False)


@parts_scenario(tolerance=TOLERANCE)
def adversaries_of_one_model_overlapped(context: Context) -> Any:
    return train_adversaries(context, overlap=True)


@parts_scenario(compare=False)
def a_part_that_the_loss_does_not_reach_is_named(context: Context) -> None:
    module = Adversaries()
    model = context.wrap(module)
    optimizers = [
        offload(context, torch.optim.SGD(part.parameters(), lr=0.1), model)
        for part in (module.generator, module.discriminator)
    ]
    model(context.inputs(0, 4, 8), generates=False).mean().backward()
    with raises(RuntimeError, "6 of 10 parameters", "generator.0.weight", "find_unused_parameters=True"):
        optimizers[1].step()
    dist.barrier()


# ---- parameters that come later ----


def train_with_a_layer_that_comes_later(context: Context, *, overlap: bool, is_added: bool) -> Any:
    module = wide_mlp()
    module[0].requires_grad_(False)
    model = context.wrap(module)
    members = [p for p in module.parameters() if p.requires_grad or not is_added]
    optimizer = offload(context, torch.optim.AdamW(members, lr=1e-3), model, overlap=overlap)
    for step in range(8):
        if step == 4:
            module[0].requires_grad_(True)
            if is_added:
                optimizer.add_param_group({"params": list(module[0].parameters()), "lr": 3e-3})
            if not context.is_coarse:
                model = context.wrap(module)  # torch's class never averages what was frozen
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
    assert_equal_on_all_workers(context, module.parameters())
    return everything(module, optimizer)


for _overlap in (False, True):
    for _is_added in (False, True):
        _what = "added" if _is_added else "thawed"
        PARTS_SCENARIOS[f"a_layer_that_is_{_what}_{'overlapped' if _overlap else 'in_step'}"] = Scenario(
            functools.partial(train_with_a_layer_that_comes_later, overlap=_overlap, is_added=_is_added),
            True,
            TOLERANCE,
        )


@parts_scenario(tolerance=TOLERANCE)
def trained_parameters_that_are_added(context: Context) -> Any:
    """Their gradients were averaged before, and nobody updated them."""
    module = wide_mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(module[0].parameters(), lr=0.1, momentum=0.9), model)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": list(module[2].parameters())})
        module.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
    return everything(module, optimizer)


@parts_scenario(compare=False)
def master_weights_stay_when_parameters_are_added(context: Context) -> None:
    module = mlp().to(torch.bfloat16)
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(module[0].parameters(), lr=1e-3), model)
    loss_of(model, context, 0).backward()
    optimizer.step()
    before = optimizer.state_dict()["state"]
    optimizer.add_param_group({"params": list(module[2].parameters())})
    after = optimizer.state_dict()["state"]
    assert before.keys() == after.keys() == {0, 1}
    for number, state in before.items():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
        assert all(torch.equal(state[name], after[number][name]) for name in state)


@parts_scenario(compare=False)
def a_checkpoint_has_what_came_later(context: Context) -> None:
    from coarse.torch.checkpoint import Checkpointer

    paths: list[Any] = [tempfile.mkdtemp() if context.rank == 0 else None]
    dist.broadcast_object_list(paths)
    ends = []
    for is_resumed in (False, True):
        module = wide_mlp()
        model = context.wrap(module)
        optimizer = offload(context, torch.optim.AdamW(module[2].parameters(), lr=1e-2), model)
        with Checkpointer(paths[0], model, optimizer) as checkpointer:
            if is_resumed:
                optimizer.add_param_group({"params": list(module[0].parameters())})
                assert checkpointer.restore() == 4
            for step in range(4 if is_resumed else 0, 6):
                if step == 2:
                    checkpointer.save(wait=False)  # and what is being written lies where the parameters were
                    optimizer.add_param_group({"params": list(module[0].parameters())})
                if step == 4 and not is_resumed:
                    checkpointer.save()
                optimizer.zero_grad()
                loss_of(model, context, step).backward()
                optimizer.step()
                checkpointer.step()
            assert checkpointer.counts.num_failed == 0
        ends.append(list(module.parameters()))
        model.close()
    assert all(map(torch.equal, *ends))


@parts_scenario(compare=False)
def what_cannot_be_added_is_refused(context: Context) -> None:
    module = mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.SGD(module[0].parameters(), lr=0.1), model)
    offload(context, torch.optim.SGD(module[2].parameters(), lr=0.1), model)
    with raises(ValueError, "1 trainable parameter(s)", "not in the module that was wrapped"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with raises(
        RuntimeError,
        "'2.weight' and 1 more of the model cannot get a second DistributedOptimizer",
        "the first one runs SGD",
    ):
        optimizer.add_param_group({"params": list(module[2].parameters())})
    with raises(ValueError, "appear in more than one parameter group"):
        optimizer.add_param_group({"params": [module[0].weight]})
    assert len(optimizer.param_groups) == 1
    loss_of(model, context, 0).backward()
    optimizer.step()


# ---- workers that run out of inputs ----


def train_unevenly(context: Context, **options: Any) -> Any:
    """Worker 0 has four batches more, and its state counts in the end."""
    module = wide_mlp()
    model = context.wrap(module)
    optimizer = offload(context, torch.optim.AdamW(model.parameters(), lr=1e-3), model, **options)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
    with model.join():
        for step in range(2, 8 if context.rank == 0 else 4):
            optimizer.zero_grad()
            loss_of(model, context, step).backward()
            optimizer.step()
    if context.is_coarse:
        assert optimizer.runs_in_memory_devices
    else:  # torch leaves worker 1's state as it was when inputs ran out
        states = [optimizer.state_dict()]
        dist.broadcast_object_list(states)
        optimizer.load_state_dict(states[0])
    for step in range(8, 10):
        optimizer.zero_grad()
        loss_of(model, context, step).backward()
        optimizer.step()
    assert_equal_on_all_workers(context, module.parameters())
    return everything(module, optimizer)


@parts_scenario(tolerance=TOLERANCE)
def join_with_an_optimizer_in_step(context: Context) -> Any:
    return train_unevenly(context)


@parts_scenario(tolerance=TOLERANCE)
def join_with_an_optimizer_overlapped(context: Context) -> Any:
    return train_unevenly(context, overlap=True)


@parts_scenario(compare=False)
def join_of_16_bit_parameters_is_refused(context: Context) -> None:
    model = context.wrap(mlp().to(torch.bfloat16))
    offload(context, torch.optim.SGD(model.parameters(), lr=0.1), model)
    with raises(ValueError, "torch.bfloat16", "the same number of batches", "torch.autocast"), model.join():
        pass

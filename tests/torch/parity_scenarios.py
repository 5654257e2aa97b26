"""The scenarios of the parity suite: small training runs, each for one semantic of torch DDP."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scenario import (
    Branches,
    Checkpointed,
    Context,
    LazilyNegated,
    Scenario,
    Severed,
    Tied,
    TwoOutputs,
    assert_equal_on_all_workers,
    convnet,
    mlp,
    raises,
    scenario,
    states,
    train,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.checkpoint import checkpoint

PARITY_SCENARIOS: dict[str, Scenario] = {}

parity = functools.partial(scenario, registry=PARITY_SCENARIOS)


@parity
def averages_where_the_processor_copies_gradients(context: Context) -> Any:
    if not context.is_coarse:
        return train(context, context.wrap(mlp()))
    from coarse.torch.gradients.paths.host_gradients import HostGradients
    from coarse.torch.session import session_of_group

    session = session_of_group(dist.group.WORLD).session
    chosen = session.settings
    session.settings = dataclasses.replace(chosen, gpu_transfers="off")
    try:
        model = context.wrap(mlp())
    finally:
        session.settings = chosen
    assert isinstance(model._gradients.rest._path, HostGradients)
    return train(context, model)


# Gradients are averaged.


@parity
def averages_gradients(context: Context) -> Any:
    return train(context, context.wrap(mlp()), steps=5)


@parity
def averages_gradients_with_adamw(context: Context) -> Any:
    model = context.wrap(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for step in range(5):
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8)).square().mean().backward()
        optimizer.step()
    return states(model)


@parity
def gradients_as_own_tensors(context: Context) -> Any:
    return train(context, context.wrap(mlp(), gradient_as_bucket_view=False), steps=5)


@parity
def gradients_as_views(context: Context) -> Any:
    return train(context, context.wrap(mlp(), gradient_as_bucket_view=True), steps=5)


@parity
def gradients_zeroed_in_place(context: Context) -> Any:
    return [
        train(context, context.wrap(mlp(), gradient_as_bucket_view=view), set_to_none=False)
        for view in (False, True)
    ]


@parity
def accumulates_over_synchronised_steps(context: Context) -> Any:
    model = context.wrap(mlp())
    for step in range(3):
        model(context.inputs(step, 4, 8)).square().mean().backward()
    return states(model)


@parity
def gradients_that_are_given_other_memory(context: Context) -> Any:
    model = context.wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8)).square().mean().backward()
        if step % 2:
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data * 0.5
        optimizer.step()
    return states(model)


@parity
def gradients_that_are_sent_to_other_processes(context: Context) -> Any:
    model = context.wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step == 3)
        model(context.inputs(step, 4, 8)).square().mean().backward()
        if step == 1:
            for parameter in model.parameters():
                parameter.grad.share_memory_()  # as torch.multiprocessing does with what it sends
        optimizer.step()
    return states(model)


@parity
def gradients_that_are_negated_when_they_are_read(context: Context) -> Any:
    return [
        train(context, context.wrap(LazilyNegated(), gradient_as_bucket_view=view)) for view in (False, True)
    ]


@parity
def trains_convolutions_and_batch_norm(context: Context) -> Any:
    return train(context, context.wrap(convnet()), shape=(4, 3, 8, 8))


@parity
def trains_channels_last(context: Context) -> Any:
    model = convnet().to(memory_format=torch.channels_last)
    result = train(context, context.wrap(model), shape=(4, 3, 8, 8))
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    return result


@parity
def trains_transposed_and_scalar_parameters(context: Context) -> Any:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.transposed = nn.Parameter(torch.randn(4, 8).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * (x @ self.transposed)

    return train(context, context.wrap(Odd()))


@parity
def trains_complex_parameters(context: Context) -> Any:
    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phases = nn.Parameter(torch.linspace(0, 3, 32).view(8, 4) * (1 + 2j))
            self.wide = nn.Parameter(torch.ones(4, 4, dtype=torch.complex128))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            # The gradient of a conjugate is one that is conjugated when it is read.
            return (inputs.to(torch.complex64) @ self.phases.conj() @ self.wide.to(torch.complex64)).abs()

    return [train(context, context.wrap(Phases(), gradient_as_bucket_view=view)) for view in (False, True)]


@parity
def trains_tied_weights(context: Context) -> Any:
    model = context.wrap(Tied())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens = torch.randint(
            0, 10, (4, 5), generator=torch.Generator().manual_seed(10 * context.rank + step)
        )
        optimizer.zero_grad()
        model(tokens).logsumexp(1).mean().backward()
        optimizer.step()
    return states(model)


@parity
def leaves_frozen_parameters_alone(context: Context) -> Any:
    module = mlp()
    module[0].requires_grad_(False)
    return train(context, context.wrap(module))


@parity
def ignores_what_the_module_lists(context: Context) -> Any:
    torch.manual_seed(context.rank)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    module._ddp_params_and_buffers_to_ignore = ["0.weight", "1.running_mean"]
    return train(context, context.wrap(module))


@parity
def passes_nan_through(context: Context) -> Any:
    model = context.wrap(mlp())
    factor = float("nan") if context.rank else 1.0
    (model(context.inputs(0, 4, 8)).sum() * factor).backward()
    return states(model)


# Dtypes.


def _train_in(context: Context, dtype: torch.dtype) -> Any:
    model = context.wrap(mlp().to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8).to(dtype)).float().square().mean().backward()
        optimizer.step()
    return states(model)


@parity
def trains_float64(context: Context) -> Any:
    return _train_in(context, torch.float64)


@parity
def trains_bfloat16(context: Context) -> Any:
    return _train_in(context, torch.bfloat16)


# Below 6e-5 float16 has fewer digits: torch halves before it adds, COARSE afterwards.
@parity(tolerance=1e-7)
def trains_float16(context: Context) -> Any:
    return _train_in(context, torch.float16)


@parity
def trains_mixed_dtypes(context: Context) -> Any:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
            self.high = nn.Linear(8, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.high(self.low(x.bfloat16()).double())

    return train(context, context.wrap(Mixed()))


@parity
def trains_under_autocast(context: Context) -> Any:
    model = context.wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(context.inputs(step, 4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
    return states(model)


# The start.


@parity
def starts_from_worker_0(context: Context) -> Any:
    torch.manual_seed(context.rank)
    module = convnet()
    module[5].bias.requires_grad_(False)
    module[1].running_mean.normal_()
    module[1].num_batches_tracked.fill_(context.rank + 7)
    return states(context.wrap(module))


@parity
def starts_from_worker_0_with_large_and_strided_parameters(context: Context) -> Any:
    torch.manual_seed(context.rank)
    module = nn.Sequential(nn.Linear(600, 500), nn.Conv2d(64, 32, 3).to(memory_format=torch.channels_last))
    return states(context.wrap(module))


@parity
def starts_as_it_is_without_init_sync(context: Context) -> Any:
    torch.manual_seed(context.rank)
    return train(context, context.wrap(mlp(), init_sync=False))


@parity
def starts_with_own_buffers_without_broadcast(context: Context) -> Any:
    torch.manual_seed(context.rank)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    module[1].running_mean.normal_()
    return train(context, context.wrap(module, broadcast_buffers=False))


# Buffers.


@parity
def broadcasts_buffers_before_each_forward(context: Context) -> Any:
    model = context.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    means = []
    for step in range(3):
        model(context.inputs(step, 4, 8)).sum().backward()
        means.append(model.module[1].running_mean.clone())
    return means


@parity
def broadcasts_buffers_only_after_synchronised_forwards(context: Context) -> Any:
    model = context.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    seen = []
    for step, how in enumerate(["sync", "no_sync", "sync", "no_grad", "sync", "eval", "sync"]):
        model.train(how != "eval")
        manager = {"no_sync": model.no_sync, "no_grad": torch.no_grad}.get(how, contextlib.nullcontext)
        with manager():
            output = model(context.inputs(step, 4, 8)).sum()
            if output.requires_grad:
                output.backward()
        seen.append(model.module[1].running_mean.clone())
    return seen


@parity
def broadcasts_buffers_that_the_module_replaces(context: Context) -> Any:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
            self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps = self.steps + context.rank + 1
            self.seen = torch.tensor([True, bool(context.rank)])
            return self.layer(x)

    return train(context, context.wrap(Counter()))


@parity
def several_forwards_with_buffers_before_one_backward(context: Context) -> Any:
    model = context.wrap(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), broadcast_buffers=False
    )
    (model(context.inputs(0, 4, 8)).sum() + model(context.inputs(1, 4, 8)).square().sum()).backward()
    return states(model)


# no_sync and backward in parts.


@parity
def no_sync_accumulates_locally(context: Context) -> Any:
    results = []
    for set_to_none in (True, False):
        model = context.wrap(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                model(context.inputs(step, 4, 8)).square().mean().backward()
            results.append(states(model))
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
    return results


@parity
def no_sync_counts_at_forward(context: Context) -> Any:
    model = context.wrap(mlp())
    output = model(context.inputs(0, 4, 8)).square().mean()
    with model.no_sync():
        output.backward()
    synchronised = states(model)
    with model.no_sync():
        output = model(context.inputs(1, 4, 8)).square().mean()
    output.backward()
    return synchronised, states(model)


@parity
def several_forwards_before_one_backward(context: Context) -> Any:
    model = context.wrap(mlp())
    sum(model(context.inputs(step, 4, 8)).square().mean() for step in range(3)).backward()
    return states(model)


@parity
def forward_without_backward_in_between(context: Context) -> Any:
    model = context.wrap(mlp())
    model(context.inputs(0, 4, 8))
    with torch.no_grad():
        model(context.inputs(1, 4, 8))
    return train(context, model)


@parity
def backward_in_two_parts(context: Context) -> Any:
    model = context.wrap(TwoOutputs())
    results = []
    for step in range(2):
        outputs = model(context.inputs(step, 4, 8))
        outputs["left"].square().mean().backward()
        outputs["right"].square().mean().backward()
        results.append(states(model))
    return results


@parity
def second_backward_of_one_forward_stays_local(context: Context) -> Any:
    model = context.wrap(mlp(), gradient_as_bucket_view=False)
    loss = model(context.inputs(0, 4, 8)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return states(model)


@parity
def a_backward_that_failed_before_its_first_gradient_is_repeated(context: Context) -> Any:
    model = context.wrap(mlp())
    loss = model(context.inputs(0, 4, 8)).square().mean()

    def fail(*_: Any) -> None:
        raise ValueError("not yet")

    failing = loss.grad_fn.next_functions[0][0].next_functions[0][0].register_hook(fail)
    with raises(ValueError, "not yet"):
        loss.backward(retain_graph=True)
    failing.remove()
    loss.backward()
    return states(model)


@parity
def hooks_of_gradients_that_come_after_wrapping(context: Context) -> Any:
    model = context.wrap(mlp(width=1024))

    def scale(parameter: nn.Parameter) -> None:
        time.sleep(0.05)  # whatever is under way arrives
        parameter.grad.mul_(context.rank + 1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(scale)
    model(context.inputs(0, 4, 8)).square().mean().backward()
    return states(model)


@parity
def torch_autograd_grad_averages_nothing(context: Context) -> Any:
    model = context.wrap(mlp())
    loss = model(context.inputs(0, 4, 8)).square().mean()
    local = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    return list(local), states(model)


@parity
def operations_that_give_a_parameter_no_gradient(context: Context) -> Any:
    results = []
    options: list[dict[str, bool]] = [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ]
    for option in options:
        for severed in ((0, 1), (0,)):
            if option.get("static_graph") and severed == (0,):
                continue  # graphs differ between workers
            model = context.wrap(Severed(), **option)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
            for step in range(3):
                optimizer.zero_grad()
                output = model(context.inputs(step, 4, 8), is_severed=context.rank in severed)
                output.square().mean().backward()
                optimizer.step()
                results.append(states(model))
    return results


# Unused parameters.


@parity
def a_penalty_on_the_gradient_of_inputs(context: Context) -> Any:
    """torch.autograd.grad() of inputs is no backward at whose end parameters are known to be unused."""
    model = context.wrap(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        inputs = context.inputs(step, 4, 8).requires_grad_()
        output = model(inputs, (step + context.rank) % 2)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        (output.square().mean() + slope.square().mean()).backward()
        optimizer.step()
    return states(model)


@parity
def unused_parameters_keep_no_gradient(context: Context) -> Any:
    return train(context, context.wrap(Branches(), find_unused_parameters=True), head=1)


@parity
def branches_may_differ_between_workers(context: Context) -> Any:
    results = []
    for view in (False, True):
        model = context.wrap(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad(set_to_none=step != 3)
            head = (0, 1, context.rank, 1 - context.rank, 0)[step]
            model(context.inputs(step, 4, 8), head=head).square().mean().backward()
            optimizer.step()
            results.append(states(model))
    return results


@parity
def unused_under_no_sync_then_used_elsewhere(context: Context) -> Any:
    model = context.wrap(Branches(), find_unused_parameters=True)
    with model.no_sync():
        model(context.inputs(0, 4, 8), head=context.rank).square().mean().backward()
    model(context.inputs(1, 4, 8), head=1 - context.rank).square().mean().backward()
    return states(model)


@parity
def outputs_may_stay_out_of_the_loss(context: Context) -> Any:
    model = context.wrap(TwoOutputs(), find_unused_parameters=True)
    model(context.inputs(0, 4, 8))["left" if context.rank else "right"].square().mean().backward()
    return states(model)


@parity
def finding_unused_costs_nothing_where_all_are_used(context: Context) -> Any:
    return train(context, context.wrap(mlp(), find_unused_parameters=True))


# Communication hooks.


def _train_with_hook(context: Context, hook: Any, **arguments: Any) -> Any:
    results = []
    for view in (False, True):
        model = context.wrap(convnet(), gradient_as_bucket_view=view, **arguments)
        # torch's class refuses the bfloat16 hook with gloo, and averages in float32.
        if context.is_coarse or hook is not default_hooks.bf16_compress_hook:
            model.register_comm_hook(None, hook)
        results.append(train(context, model, shape=(4, 3, 8, 8)))
    return results


@parity(tolerance=4e-3)
def gradients_that_travel_in_float16(context: Context) -> Any:
    return _train_with_hook(context, default_hooks.fp16_compress_hook)


@parity(tolerance=3e-2)
def gradients_that_travel_in_bfloat16(context: Context) -> Any:
    return _train_with_hook(context, default_hooks.bf16_compress_hook)


@parity
def a_hook_that_averages_as_ever(context: Context) -> Any:
    return _train_with_hook(context, default_hooks.allreduce_hook)


@parity(tolerance=4e-3)
def builtin_hooks(context: Context) -> Any:
    results = []
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = context.wrap(mlp())
        model._register_builtin_comm_hook(kind)
        results.append(train(context, model))
    return results


def _twice_the_mean(state, bucket):
    """A hook as users write them. Of buckets of 1 MiB the model below has two, under torch from step 1 on."""
    state.append(bucket.index())
    assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
    reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0])


@parity
def a_hook_of_ones_own(context: Context) -> Any:
    seen: list[int] = []
    module = nn.Sequential(nn.Linear(8, 600), nn.Linear(600, 600), nn.Linear(600, 4))
    model = context.wrap(module)
    model.register_comm_hook(seen, _twice_the_mean)
    with model.no_sync():
        model(context.inputs(9, 4, 8)).sum().backward()
    result = train(context, model, steps=2, loss=lambda output: 0.01 * output.square().mean())
    return result, sorted(set(seen))


@parity
def a_hook_of_ones_own_with_unused_parameters(context: Context) -> Any:
    model = context.wrap(Branches(), find_unused_parameters=True)
    model.register_comm_hook([], _twice_the_mean)
    results = []
    for step, heads in enumerate([(0, 0), (0, 1), (1, 1)]):
        model.zero_grad()
        model(context.inputs(step, 4, 8), heads[context.rank]).square().mean().backward()
        results.append(states(model))
    return results


@parity
def low_rank_gradients(context: Context) -> Any:
    model = context.wrap(nn.Linear(64, 32))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(context, model, steps=5, shape=(4, 64))


@parity(tolerance=4e-3)
def narrow_gradients_of_unused_parameters(context: Context) -> Any:
    model = context.wrap(Branches(), find_unused_parameters=True)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=step != 3)
        head = (0, context.rank, 1 - context.rank, 0)[step] % 2
        model(context.inputs(step, 4, 8), head=head).square().mean().backward()
        optimizer.step()
        results.append(states(model))
    return results


@parity(tolerance=4e-3)
def narrow_gradients_that_accumulate(context: Context) -> Any:
    model = context.wrap(mlp(), static_graph=True)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(context, model, steps=2)
    with model.no_sync():
        model(context.inputs(7, 4, 8)).square().mean().backward()
    model(context.inputs(8, 4, 8)).square().mean().backward()
    return states(model)


# Static graph and checkpointing.


@parity
def static_graph(context: Context) -> Any:
    return train(context, context.wrap(mlp(), static_graph=True), steps=4)


@parity
def static_graph_with_unused_parameters(context: Context) -> Any:
    return train(context, context.wrap(Branches(), static_graph=True), steps=4, head=1)


@parity
def static_graph_with_no_sync(context: Context) -> Any:
    model = context.wrap(mlp(), static_graph=True)
    train(context, model, steps=2)
    with model.no_sync():
        model(context.inputs(7, 4, 8)).square().mean().backward()
    model(context.inputs(8, 4, 8)).square().mean().backward()
    return states(model)


@parity
def checkpointing_without_reentry(context: Context) -> Any:
    module = Checkpointed(reentrant=False, times=2)
    module.unused.requires_grad_(False)
    return train(context, context.wrap(module))


@parity
def checkpointing_without_reentry_finds_unused(context: Context) -> Any:
    return train(context, context.wrap(Checkpointed(reentrant=False), find_unused_parameters=True))


@parity
def checkpointing_with_reentry(context: Context) -> Any:
    module = Checkpointed(reentrant=True)
    module.unused.requires_grad_(False)
    return train(context, context.wrap(module))


@parity
def checkpointing_with_reentry_in_a_static_graph(context: Context) -> Any:
    return train(context, context.wrap(Checkpointed(reentrant=True), static_graph=True), steps=4)


@parity
def checkpointing_one_layer_several_times(context: Context) -> Any:
    return train(context, context.wrap(Checkpointed(reentrant=True, times=3), static_graph=True), steps=4)


@parity
def checkpointing_the_wrapper_itself(context: Context) -> Any:
    model = context.wrap(mlp())
    output = checkpoint(model, context.inputs(0, 4, 8).requires_grad_(), use_reentrant=False)
    output.square().mean().backward()
    return states(model)


# What users do around backward.


@parity
def grad_scaler(context: Context) -> Any:
    model = context.wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        factor = float("inf") if step == 2 and context.rank == 1 else 1.0
        scaler.scale(model(context.inputs(step, 4, 8)).square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, states(model)


@parity
def clipping_between_backward_and_step(context: Context) -> Any:
    model = context.wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8)).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return norms, states(model)


@parity
def averages_gradients_that_no_hook_has_seen(context: Context) -> Any:
    """As after the replay of a CUDA graph, which writes to the same memory in each step."""
    model = context.wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = None
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        with model.no_sync() if context.is_coarse else contextlib.nullcontext():
            model(context.inputs(step, 4, 8)).square().mean().backward()
        if context.is_coarse:
            places = places or [parameter.grad.data_ptr() for parameter in model.parameters()]
            model.average_gradients()
            assert [parameter.grad.data_ptr() for parameter in model.parameters()] == places
        optimizer.step()
    return states(model)


@parity
def averages_by_hand_what_some_workers_have(context: Context) -> Any:
    model = context.wrap(Branches(), find_unused_parameters=True)
    found = []
    for step in range(3):
        model.zero_grad()
        with model.no_sync() if context.is_coarse else contextlib.nullcontext():
            model(context.inputs(step, 4, 8), (step + context.rank) % 2).square().mean().backward()
        if context.is_coarse:
            model.average_gradients()
        found.append(states(model))
    return found


@parity
def two_models_trained_in_turn(context: Context) -> Any:
    generator, critic = context.wrap(nn.Linear(8, 8)), context.wrap(nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        critic(generator(context.inputs(step, 4, 8)).detach()).square().mean().backward()
        optimizers[1].step()
        critic.requires_grad_(False)
        critic(generator(context.inputs(step + 10, 4, 8))).mean().backward()
        critic.requires_grad_(True)
        optimizers[0].step()
    return states(generator), states(critic)


@parity
def one_model_feeds_another(context: Context) -> Any:
    encoder, decoder = context.wrap(nn.Linear(8, 8)), context.wrap(nn.Linear(8, 4))
    for step in range(2):
        decoder(encoder(context.inputs(step, 4, 8))).square().mean().backward()
    return states(encoder), states(decoder)


@parity
def outputs_in_nested_structures(context: Context) -> Any:
    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor
        rest: tuple[dict[str, torch.Tensor], int]

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> Output:
            y = self.layer(x)
            return Output(loss=y.square().mean(), rest=({"y": y}, 3))

    model = context.wrap(Nested())
    for step in range(2):
        model(context.inputs(step, 4, 8)).loss.backward()
    return states(model)


@parity(compare=False)
def create_graph_averages_without_its_graph(context: Context) -> Any:
    """torch's class fails here from some version on, and averages likewise in others."""
    for view in (True, False):
        model = context.wrap(mlp(), gradient_as_bucket_view=view)
        with pytest.warns(UserWarning, match="second-order"):
            model(context.inputs(0, 4, 8)).square().mean().backward(create_graph=True)
        assert_equal_on_all_workers(context, [parameter.grad for parameter in model.parameters()])
        model.zero_grad()


# Uneven inputs.


@parity
def join_divides_by_all_workers(context: Context) -> Any:
    return _join(context, context.wrap(mlp()))


@parity
def join_divides_by_remaining_workers(context: Context) -> Any:
    return _join(context, context.wrap(mlp()), divide_by_initial_world_size=False)


@parity
def join_with_buffers(context: Context) -> Any:
    model = context.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    return _join(context, model)


@parity
def join_with_unused_parameters(context: Context) -> Any:
    return _join(context, context.wrap(Branches(), find_unused_parameters=True), branch=True)


@parity
def join_with_no_sync(context: Context) -> Any:
    return _join(context, context.wrap(mlp()), accumulate=True)


@parity
def join_with_equal_inputs(context: Context) -> Any:
    return _join(context, context.wrap(mlp()), extra=0)


def _join(
    context: Context,
    model: Any,
    *,
    extra: int = 3,
    branch: bool = False,
    accumulate: bool = False,
    **how: Any,
) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(**how):
        for step in range(3 + extra * context.rank):
            local = accumulate and step % 2 == 0
            with model.no_sync() if local else contextlib.nullcontext():
                arguments = {"head": step % 2} if branch else {}
                model(context.inputs(step, 4, 8), **arguments).square().mean().backward()
            if not local:
                optimizer.step()
                optimizer.zero_grad()
    return {name: value for name, value in states(model).items() if not name.endswith(".grad")}


@parity
def join_can_stop_all_workers_early(context: Context) -> Any:
    model = context.wrap(mlp())
    steps = 0
    try:
        with model.join(throw_on_early_termination=True):
            for step in range(2 + 2 * context.rank):
                model(context.inputs(step, 4, 8)).sum().backward()
                steps += 1
    except RuntimeError as error:
        return steps, str(error)
    raise AssertionError("nothing was raised")


@parity
def join_of_two_models(context: Context) -> Any:
    from torch.distributed.algorithms.join import Join

    models = [context.wrap(nn.Linear(8, 4)), context.wrap(nn.Linear(8, 2))]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    with Join(models):
        for step in range(2 + 2 * context.rank):
            optimizer.zero_grad()
            for model in models:
                model(context.inputs(step, 4, 8)).square().mean().backward()
            optimizer.step()
    return [list(model.parameters()) for model in models]


@parity(compare=False)
def join_of_two_models_with_one_backward(context: Context) -> Any:
    """torch's class mixes up the order of its collectives here."""
    from torch.distributed.algorithms.join import Join

    models = [context.wrap(nn.Linear(8, 4)), context.wrap(nn.Linear(4, 2))]
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with Join(models):
        for step in range(2 + 2 * context.rank):
            optimizer.zero_grad()
            models[1](models[0](context.inputs(step, 4, 8))).square().mean().backward()
            optimizer.step()
    assert_equal_on_all_workers(context, parameters)


# torch.compile.


@parity
def compiled_module(context: Context) -> Any:
    torch._dynamo.reset()
    return train(context, context.wrap(torch.compile(mlp(), backend="aot_eager")))


@parity
def compiled_wrapper(context: Context) -> Any:
    torch._dynamo.reset()
    model = context.wrap(mlp(width=40_000), bucket_cap_mb=1)
    compiled = torch.compile(model, backend="aot_eager")
    train(context, compiled)
    return states(model)


@parity
def compiled_training_step(context: Context) -> Any:
    torch._dynamo.reset()
    model = context.wrap(mlp())

    @torch.compile(backend="aot_eager")
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    for number in range(2):
        step(context.inputs(number, 4, 8))
    return states(model)


# Process groups.


@parity
def takes_a_sub_group(context: Context) -> Any:
    everyone = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(context.world_size)][context.rank]
    model = context.wrap(mlp(), process_group=everyone)
    lonely = context.wrap(mlp(), process_group=alone)
    return train(context, model), train(context, lonely)


@parity
def takes_a_device_mesh(context: Context) -> Any:
    mesh = dist.device_mesh.init_device_mesh("cpu", (context.world_size,))
    return train(context, context.wrap(mlp(), device_mesh=mesh))


# Saving and loading.


@parity
def state_dict_has_the_prefix(context: Context) -> Any:
    return dict(context.wrap(convnet()).state_dict())


@parity(compare=False)
def state_dict_loads_with_and_without_the_prefix(context: Context) -> Any:
    source = context.wrap(convnet())
    with_prefix, without = source.state_dict(), source.module.state_dict()
    for state in (with_prefix, without, dict(without)):
        target = context.wrap(convnet())
        assert not target.load_state_dict(state).missing_keys
        torch.testing.assert_close(target.state_dict(), with_prefix, rtol=0, atol=0)
    with raises(RuntimeError, "Missing key"):
        target.load_state_dict({"0.weight": without["0.weight"]})
    with raises(ValueError, "assign"):
        target.load_state_dict(without, assign=True)


@parity(compare=False)
def state_dict_of_a_module_with_a_child_called_module(context: Context) -> Any:
    module = nn.Module()
    module.module = nn.Linear(2, 2)
    module.forward = lambda x: module.module(x)
    model = context.wrap(module)
    model.load_state_dict(module.state_dict())
    model.load_state_dict(model.state_dict())


@parity(compare=False)
def modules_inside_can_be_copied_and_pickled(context: Context) -> Any:
    model = context.wrap(mlp())
    train(context, model)
    clone = copy.deepcopy(model.module)
    restored = pickle.loads(pickle.dumps(model.module))
    for other in (clone, restored):
        torch.testing.assert_close(other.state_dict(), model.module.state_dict(), rtol=0, atol=0)
        other(context.inputs(context.rank, 4, 8)).sum().backward()  # stays local


@parity
def copies_of_wrapped_models_average_by_themselves(context: Context) -> Any:
    model = context.wrap(Branches(), find_unused_parameters=True, gradient_as_bucket_view=True)
    train(context, model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    results = [train(context, each, head=1) for each in (*copies, model)]
    for each in copies:
        assert type(each) is type(model)
        assert each.find_unused_parameters
        assert each.gradient_as_bucket_view
    return results


@parity
def averaged_weights_of_a_wrapped_model(context: Context) -> Any:
    """On worker 0 alone, as it is often done."""
    model = context.wrap(convnet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model) if context.rank == 0 else None
    for step in range(3):
        optimizer.zero_grad()
        model(context.inputs(step, 4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model)
    if average is None:
        return None
    with torch.no_grad():
        # The bare module: torch's class would broadcast buffers.
        return states(average), average.eval().module.module(context.inputs(9, 4, 3, 8, 8))


class CallsCounted:
    """A hook that notes its calls."""

    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def __call__(self, *_: Any) -> None:
        self.calls.append(1)


@parity
def copies_of_a_model_in_evaluation(context: Context) -> Any:
    model = context.wrap(mlp()).eval()
    calls = []
    model.register_forward_hook(CallsCounted(calls))
    twin = copy.deepcopy(model)
    assert not twin.training
    with torch.no_grad():
        output = twin(context.inputs(0, 4, 8))
    assert not calls  # the copy has a list of its own
    twin.train()
    return output, train(context, twin)


@parity(compare=False)
def copies_of_a_model_in_a_smaller_group_are_refused(context: Context) -> Any:
    groups = [dist.new_group([rank]) for rank in range(context.world_size)]
    model = context.wrap(mlp(), process_group=groups[context.rank])
    for copying in (pickle.dumps, copy.deepcopy):
        with raises(RuntimeError, "default process group"):
            copying(model)


@parity
def trains_a_transformer(context: Context) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    configuration = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = context.wrap(transformers.BertForQuestionAnswering(configuration).eval())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * context.rank + step)
        tokens = torch.randint(0, 50, (2, 12), generator=generator)
        optimizer.zero_grad()
        model(
            input_ids=tokens, start_positions=tokens[:, 0] % 12, end_positions=tokens[:, 1] % 12
        ).loss.backward()
        optimizer.step()
    return states(model)

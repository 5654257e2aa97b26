"""The scenarios of the parity suite: small training runs, each for one promised semantic.

A scenario gets a Context, wraps modules with `context.wrap` and returns what must be equal under both
classes. Those with compare=False check by assertions what only COARSE promises. Inputs differ between workers
and steps.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import os
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class Context:
    """Who runs the scenario, and the class to wrap modules with."""

    rank: int
    world_size: int
    wrap: Any
    is_coarse: bool

    def inputs(self, step: int, *shape: int) -> torch.Tensor:
        """Distinct for each worker and step, the same under both classes."""
        generator = torch.Generator("cpu").manual_seed(1000 * self.rank + step)
        return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A function with what its results are compared to."""

    run_unpacked: Callable[[Context], Any]
    compare: bool
    tolerance: float

    def run(self, context: Context) -> Any:
        """Runs it, and turns tensors into arrays, which need no shared memory to be sent."""
        try:
            return pack(self.run_unpacked(context))
        finally:
            gc.collect()


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    function: Callable[[Context], Any] | None = None,
    *,
    compare: bool = True,
    tolerance: float = 0.0,
    registry: dict[str, Scenario] = SCENARIOS,
) -> Any:
    """Registers a scenario under the name of its function."""

    def register(run: Callable[[Context], Any]) -> Callable[[Context], Any]:
        registry[run.__name__] = Scenario(run, compare, tolerance)
        return run

    return register if function is None else register(function)


def pack(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        values = result.detach().clone()
        # Exact for every dtype that gradients may have; numpy has no bfloat16.
        return str(result.dtype), (values.double() if values.is_floating_point() else values).numpy()
    if isinstance(result, dict):
        return {key: pack(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [pack(value) for value in result]
    return result


def states(model: nn.Module) -> dict[str, Any]:
    """Parameters, their gradients and buffers."""
    found: dict[str, Any] = dict(model.named_parameters())
    found.update({f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()})
    found.update(model.named_buffers())
    return {name: value.detach().clone() if value is not None else None for name, value in found.items()}


def train(
    context: Context,
    model: nn.Module,
    *,
    steps: int = 3,
    shape: tuple[int, ...] = (4, 8),
    set_to_none: bool = True,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda output: output.square().mean(),
    **arguments: Any,
) -> dict[str, Any]:
    """A plain training loop; its result is the whole model."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(model(context.inputs(step, *shape), **arguments)).backward()
        optimizer.step()
    return states(model)


@contextlib.contextmanager
def raises(kind: type[BaseException] | str, *words: str) -> Iterator[None]:
    """The block must raise `kind` (or an error of that name) with all `words` in its message."""
    # Kinds of coarse are given by name, so that torch's class can be run without importing it.
    with pytest.raises(Exception) as raised:  # noqa: PT011
        yield
    names = {cls.__name__ for cls in raised.type.__mro__}
    assert (kind if isinstance(kind, str) else kind.__name__) in names, repr(raised.value)
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"


def assert_equal_on_all_workers(context: Context, tensors: Iterable[torch.Tensor]) -> None:
    """Bit by bit."""
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(context.world_size)]
        dist.all_gather(gathered, tensor.detach())
        assert all(torch.equal(gathered[0], other) for other in gathered[1:])


def mlp(*, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


@scenario
def averages_where_the_processor_copies_gradients(context: Context) -> Any:
    if not context.is_coarse:
        return train(context, context.wrap(mlp()))
    from coarse.torch.host_gradients import HostGradients
    from coarse.torch.session import session_of_group

    session = session_of_group(dist.group.WORLD).session
    chosen = session.settings
    session.settings = dataclasses.replace(chosen, gpu_transfers="off")
    try:
        model = context.wrap(mlp())
    finally:
        session.settings = chosen
    assert isinstance(model._gradients._path, HostGradients)
    return train(context, model)


class Branches(nn.Module):
    """A shared trunk and two heads, of which forward uses the one asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head](self.trunk(x).relu())


class TwoOutputs(nn.Module):
    """Two independent layers, one output each."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"left": self.left(x), "right": self.right(x)}


class Checkpointed(nn.Module):
    """Runs one layer in checkpointed segments, as often as asked for."""

    def __init__(self, *, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(8, 4)
        self._reentrant = reentrant
        self._times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self._times):
            x = checkpoint(self.layer, x, use_reentrant=self._reentrant)
        return self.last(x)


class Tied(nn.Module):
    """An embedding whose weight is also the output projection, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.projection = nn.Linear(8, 10, bias=False)
        self.projection.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.projection(self.embedding(tokens).mean(1))


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


# Gradients are averaged.


@scenario
def averages_gradients(context: Context) -> Any:
    return train(context, context.wrap(mlp()), steps=5)


@scenario
def averages_gradients_with_adamw(context: Context) -> Any:
    model = context.wrap(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for step in range(5):
        optimizer.zero_grad()
        model(context.inputs(step, 4, 8)).square().mean().backward()
        optimizer.step()
    return states(model)


@scenario
def gradients_as_own_tensors(context: Context) -> Any:
    return train(context, context.wrap(mlp(), gradient_as_bucket_view=False), steps=5)


@scenario
def gradients_as_views(context: Context) -> Any:
    return train(context, context.wrap(mlp(), gradient_as_bucket_view=True), steps=5)


@scenario
def gradients_zeroed_in_place(context: Context) -> Any:
    return [
        train(context, context.wrap(mlp(), gradient_as_bucket_view=view), set_to_none=False)
        for view in (False, True)
    ]


@scenario
def accumulates_over_synchronised_steps(context: Context) -> Any:
    model = context.wrap(mlp())
    for step in range(3):
        model(context.inputs(step, 4, 8)).square().mean().backward()
    return states(model)


@scenario
def trains_convolutions_and_batch_norm(context: Context) -> Any:
    return train(context, context.wrap(convnet()), shape=(4, 3, 8, 8))


@scenario
def trains_channels_last(context: Context) -> Any:
    model = convnet().to(memory_format=torch.channels_last)
    result = train(context, context.wrap(model), shape=(4, 3, 8, 8))
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    return result


@scenario
def trains_transposed_and_scalar_parameters(context: Context) -> Any:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.transposed = nn.Parameter(torch.randn(4, 8).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * (x @ self.transposed)

    return train(context, context.wrap(Odd()))


@scenario
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


@scenario
def leaves_frozen_parameters_alone(context: Context) -> Any:
    module = mlp()
    module[0].requires_grad_(False)
    return train(context, context.wrap(module))


@scenario
def ignores_what_the_module_lists(context: Context) -> Any:
    torch.manual_seed(context.rank)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    module._ddp_params_and_buffers_to_ignore = ["0.weight", "1.running_mean"]
    return train(context, context.wrap(module))


@scenario
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


@scenario
def trains_float64(context: Context) -> Any:
    return _train_in(context, torch.float64)


@scenario
def trains_bfloat16(context: Context) -> Any:
    return _train_in(context, torch.bfloat16)


# Below 6e-5 float16 has fewer digits: torch halves before it adds, COARSE afterwards.
@scenario(tolerance=1e-7)
def trains_float16(context: Context) -> Any:
    return _train_in(context, torch.float16)


@scenario
def trains_mixed_dtypes(context: Context) -> Any:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
            self.high = nn.Linear(8, 4, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.high(self.low(x.bfloat16()).double())

    return train(context, context.wrap(Mixed()))


@scenario
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


@scenario
def starts_from_worker_0(context: Context) -> Any:
    torch.manual_seed(context.rank)
    module = convnet()
    module[5].bias.requires_grad_(False)
    module[1].running_mean.normal_()
    module[1].num_batches_tracked.fill_(context.rank + 7)
    return states(context.wrap(module))


@scenario
def starts_from_worker_0_with_large_and_strided_parameters(context: Context) -> Any:
    torch.manual_seed(context.rank)
    module = nn.Sequential(nn.Linear(600, 500), nn.Conv2d(64, 32, 3).to(memory_format=torch.channels_last))
    return states(context.wrap(module))


@scenario
def starts_as_it_is_without_init_sync(context: Context) -> Any:
    torch.manual_seed(context.rank)
    return train(context, context.wrap(mlp(), init_sync=False))


@scenario
def starts_with_own_buffers_without_broadcast(context: Context) -> Any:
    torch.manual_seed(context.rank)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    module[1].running_mean.normal_()
    return train(context, context.wrap(module, broadcast_buffers=False))


# Buffers.


@scenario
def broadcasts_buffers_before_each_forward(context: Context) -> Any:
    model = context.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    means = []
    for step in range(3):
        model(context.inputs(step, 4, 8)).sum().backward()
        means.append(model.module[1].running_mean.clone())
    return means


@scenario
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


@scenario
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


@scenario
def several_forwards_with_buffers_before_one_backward(context: Context) -> Any:
    model = context.wrap(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), broadcast_buffers=False
    )
    (model(context.inputs(0, 4, 8)).sum() + model(context.inputs(1, 4, 8)).square().sum()).backward()
    return states(model)


# no_sync and backward in parts.


@scenario
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


@scenario
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


@scenario
def several_forwards_before_one_backward(context: Context) -> Any:
    model = context.wrap(mlp())
    sum(model(context.inputs(step, 4, 8)).square().mean() for step in range(3)).backward()
    return states(model)


@scenario
def forward_without_backward_in_between(context: Context) -> Any:
    model = context.wrap(mlp())
    model(context.inputs(0, 4, 8))
    with torch.no_grad():
        model(context.inputs(1, 4, 8))
    return train(context, model)


@scenario
def backward_in_two_parts(context: Context) -> Any:
    model = context.wrap(TwoOutputs())
    results = []
    for step in range(2):
        outputs = model(context.inputs(step, 4, 8))
        outputs["left"].square().mean().backward()
        outputs["right"].square().mean().backward()
        results.append(states(model))
    return results


@scenario
def second_backward_of_one_forward_stays_local(context: Context) -> Any:
    model = context.wrap(mlp(), gradient_as_bucket_view=False)
    loss = model(context.inputs(0, 4, 8)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return states(model)


@scenario
def torch_autograd_grad_averages_nothing(context: Context) -> Any:
    model = context.wrap(mlp())
    loss = model(context.inputs(0, 4, 8)).square().mean()
    local = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    return list(local), states(model)


# Unused parameters.


@scenario
def unused_parameters_keep_no_gradient(context: Context) -> Any:
    return train(context, context.wrap(Branches(), find_unused_parameters=True), head=1)


@scenario
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


@scenario
def unused_under_no_sync_then_used_elsewhere(context: Context) -> Any:
    model = context.wrap(Branches(), find_unused_parameters=True)
    with model.no_sync():
        model(context.inputs(0, 4, 8), head=context.rank).square().mean().backward()
    model(context.inputs(1, 4, 8), head=1 - context.rank).square().mean().backward()
    return states(model)


@scenario
def outputs_may_stay_out_of_the_loss(context: Context) -> Any:
    model = context.wrap(TwoOutputs(), find_unused_parameters=True)
    model(context.inputs(0, 4, 8))["left" if context.rank else "right"].square().mean().backward()
    return states(model)


@scenario
def finding_unused_costs_nothing_where_all_are_used(context: Context) -> Any:
    return train(context, context.wrap(mlp(), find_unused_parameters=True))


# Static graph and checkpointing.


@scenario
def static_graph(context: Context) -> Any:
    return train(context, context.wrap(mlp(), static_graph=True), steps=4)


@scenario
def static_graph_with_unused_parameters(context: Context) -> Any:
    return train(context, context.wrap(Branches(), static_graph=True), steps=4, head=1)


@scenario
def static_graph_with_no_sync(context: Context) -> Any:
    model = context.wrap(mlp(), static_graph=True)
    train(context, model, steps=2)
    with model.no_sync():
        model(context.inputs(7, 4, 8)).square().mean().backward()
    model(context.inputs(8, 4, 8)).square().mean().backward()
    return states(model)


@scenario
def checkpointing_without_reentry(context: Context) -> Any:
    module = Checkpointed(reentrant=False, times=2)
    module.unused.requires_grad_(False)
    return train(context, context.wrap(module))


@scenario
def checkpointing_without_reentry_finds_unused(context: Context) -> Any:
    return train(context, context.wrap(Checkpointed(reentrant=False), find_unused_parameters=True))


@scenario
def checkpointing_with_reentry(context: Context) -> Any:
    module = Checkpointed(reentrant=True)
    module.unused.requires_grad_(False)
    return train(context, context.wrap(module))


@scenario
def checkpointing_with_reentry_in_a_static_graph(context: Context) -> Any:
    return train(context, context.wrap(Checkpointed(reentrant=True), static_graph=True), steps=4)


@scenario
def checkpointing_one_layer_several_times(context: Context) -> Any:
    return train(context, context.wrap(Checkpointed(reentrant=True, times=3), static_graph=True), steps=4)


@scenario
def checkpointing_the_wrapper_itself(context: Context) -> Any:
    model = context.wrap(mlp())
    output = checkpoint(model, context.inputs(0, 4, 8).requires_grad_(), use_reentrant=False)
    output.square().mean().backward()
    return states(model)


# What users do around backward.


@scenario
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


@scenario
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


@scenario
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


@scenario
def one_model_feeds_another(context: Context) -> Any:
    encoder, decoder = context.wrap(nn.Linear(8, 8)), context.wrap(nn.Linear(8, 4))
    for step in range(2):
        decoder(encoder(context.inputs(step, 4, 8))).square().mean().backward()
    return states(encoder), states(decoder)


@scenario
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


@scenario(compare=False)
def create_graph_averages_without_its_graph(context: Context) -> Any:
    """torch's class fails here from some version on, and averages likewise in others."""
    for view in (True, False):
        model = context.wrap(mlp(), gradient_as_bucket_view=view)
        with pytest.warns(UserWarning, match="second-order"):
            model(context.inputs(0, 4, 8)).square().mean().backward(create_graph=True)
        assert_equal_on_all_workers(context, [parameter.grad for parameter in model.parameters()])
        model.zero_grad()


# Uneven inputs.


@scenario
def join_divides_by_all_workers(context: Context) -> Any:
    return _join(context, context.wrap(mlp()))


@scenario
def join_divides_by_remaining_workers(context: Context) -> Any:
    return _join(context, context.wrap(mlp()), divide_by_initial_world_size=False)


@scenario
def join_with_buffers(context: Context) -> Any:
    model = context.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    return _join(context, model)


@scenario
def join_with_unused_parameters(context: Context) -> Any:
    return _join(context, context.wrap(Branches(), find_unused_parameters=True), branch=True)


@scenario
def join_with_no_sync(context: Context) -> Any:
    return _join(context, context.wrap(mlp()), accumulate=True)


@scenario
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


@scenario
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


@scenario
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


@scenario(compare=False)
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


@scenario
def compiled_module(context: Context) -> Any:
    torch._dynamo.reset()
    return train(context, context.wrap(torch.compile(mlp(), backend="aot_eager")))


@scenario
def compiled_wrapper(context: Context) -> Any:
    torch._dynamo.reset()
    model = context.wrap(mlp(width=40_000), bucket_cap_mb=1)
    compiled = torch.compile(model, backend="aot_eager")
    train(context, compiled)
    return states(model)


@scenario
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


@scenario
def takes_a_sub_group(context: Context) -> Any:
    everyone = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(context.world_size)][context.rank]
    model = context.wrap(mlp(), process_group=everyone)
    lonely = context.wrap(mlp(), process_group=alone)
    return train(context, model), train(context, lonely)


@scenario
def takes_a_device_mesh(context: Context) -> Any:
    mesh = dist.device_mesh.init_device_mesh("cpu", (context.world_size,))
    return train(context, context.wrap(mlp(), device_mesh=mesh))


# Saving and loading.


@scenario
def state_dict_has_the_prefix(context: Context) -> Any:
    return dict(context.wrap(convnet()).state_dict())


@scenario(compare=False)
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


@scenario(compare=False)
def state_dict_of_a_module_with_a_child_called_module(context: Context) -> Any:
    module = nn.Module()
    module.module = nn.Linear(2, 2)
    module.forward = lambda x: module.module(x)
    model = context.wrap(module)
    model.load_state_dict(module.state_dict())
    model.load_state_dict(model.state_dict())


@scenario(compare=False)
def refuses_pickling_and_copying(context: Context) -> Any:
    model = context.wrap(mlp())
    for copying in (pickle.dumps, copy.deepcopy, copy.copy, lambda m: torch.save(m, io.BytesIO())):
        with raises(TypeError, "model.module"):
            copying(model)
    train(context, model)
    clone = copy.deepcopy(model.module)
    restored = pickle.loads(pickle.dumps(model.module))
    for other in (clone, restored):
        torch.testing.assert_close(other.state_dict(), model.module.state_dict(), rtol=0, atol=0)
        other(context.inputs(context.rank, 4, 8)).sum().backward()  # stays local


# What only COARSE promises.


@scenario(compare=False)
def is_a_torch_ddp_without_a_reducer(context: Context) -> Any:
    model = context.wrap(mlp())
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert model._get_ddp_logging_data()["world_size"] == context.world_size
    assert model.broadcast_buffers
    assert model.forward_sync_buffers
    with raises(AttributeError, "reducer._get_zeros_like_grad_buckets"):
        model.reducer._get_zeros_like_grad_buckets()


@scenario(compare=False)
def gradients_live_in_registered_memory(context: Context) -> Any:
    model = context.wrap(mlp())
    addresses = set()
    for step in range(3):
        model.zero_grad()
        model(context.inputs(step, 4, 8)).sum().backward()
        addresses.add(model.module[0].weight.grad.data_ptr())
    assert len(addresses) == 1


@scenario(compare=False)
def names_parameters_without_gradient(context: Context) -> Any:
    model = context.wrap(Branches())
    model(context.inputs(0, 4, 8)).sum().backward()
    for _ in range(2):
        with raises(RuntimeError, "heads.1.weight, heads.1.bias", "find_unused_parameters=True", "2 of 6"):
            model(context.inputs(1, 4, 8))
    with raises(RuntimeError, "heads.1.weight"):
        model._check_reducer_finalized()


@scenario(compare=False)
def names_parameters_that_fire_twice(context: Context) -> Any:
    module = Checkpointed(reentrant=True, times=2)
    module.unused.requires_grad_(False)
    model = context.wrap(module)
    with raises(RuntimeError, "layer.0", "twice", "static_graph=True"):
        train(context, model)


@scenario(compare=False)
def static_graph_notices_changes(context: Context) -> Any:
    model = context.wrap(Branches(), static_graph=True)
    train(context, model, head=0)
    with raises(RuntimeError, "heads.1", "graph has changed"):
        train(context, model, head=1)


@scenario(compare=False)
def averages_what_accumulated_although_nobody_uses_it(context: Context) -> Any:
    model = context.wrap(Branches(), find_unused_parameters=True)
    with model.no_sync():
        model(context.inputs(0, 4, 8), head=1).sum().backward()
    local = model.module.heads[1].bias.grad.clone()
    dist.all_reduce(local)
    model(context.inputs(1, 4, 8), head=0).sum().backward()
    assert torch.equal(model.module.heads[1].bias.grad, local / 2)


@scenario(compare=False)
def re_entrant_checkpointing_finds_unused(context: Context) -> Any:
    model = context.wrap(Checkpointed(reentrant=True), find_unused_parameters=True)
    result = train(context, model)
    assert result["module.unused.weight.grad"] is None
    assert_equal_on_all_workers(context, model.parameters())


@scenario(compare=False)
def refuses_sparse_gradients_of_what_is_no_layer(context: Context) -> Any:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 4))

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(index, self.table, sparse=True)

    model = context.wrap(Lookup())
    with raises(ValueError, "table", "torch.sparse_coo", "sparse=False"):
        model(torch.tensor([1])).sum().backward()


@scenario(compare=False)
def refuses_what_it_cannot_average(context: Context) -> Any:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

    with raises(ValueError, "phase", "complex64", "float32"):
        context.wrap(Complex())
    with raises(RuntimeError, "uninitialized"):
        context.wrap(nn.LazyLinear(3))
    with raises(RuntimeError, "requires a gradient"):
        context.wrap(nn.Linear(2, 2).requires_grad_(False))
    with raises(ValueError, "SyncBatchNorm"):
        context.wrap(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


@scenario(compare=False)
def refuses_arguments_that_do_not_apply(context: Context) -> Any:
    module = mlp()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"mixed_precision": object()}, "torch.autocast"),
        ({"device_ids": [0]}, "device_ids"),
        ({"device_ids": [0, 1]}, "one device"),
        ({"output_device": 0}, "output_device"),
        ({"delay_all_reduce_named_params": [("0.weight", module[0].weight)]}, "together"),
        ({"process_group": dist.group.WORLD, "device_mesh": object()}, "not both"),
    ]
    for arguments, words in refused:
        with raises(ValueError, words):
            context.wrap(module, **arguments)


@scenario(compare=False)
def refuses_hooks_and_says_what_to_do(context: Context) -> Any:
    model = context.wrap(mlp())
    for call, words in [
        (lambda: model.register_comm_hook(None, lambda state, bucket: None), "between backward and step"),
        (lambda: model._register_builtin_comm_hook(None), "bfloat16"),
        (lambda: model._register_buffer_comm_hook(None, lambda state, buffers: None), "forward_sync_buffers"),
        (lambda: model._register_fused_optim(torch.optim.SGD, 0.1), "after backward"),
        (lambda: model._update_process_group(None), "Wrap model.module again"),
    ]:
        with raises(NotImplementedError, words):
            call()


@scenario(compare=False)
def accepts_arguments_without_effect(context: Context) -> Any:
    module = mlp()
    model = context.wrap(
        module,
        device_ids=None,
        output_device=None,
        dim=0,
        broadcast_buffers=True,
        init_sync=True,
        process_group=None,
        bucket_cap_mb=1,
        find_unused_parameters=False,
        check_reduction=True,
        gradient_as_bucket_view=True,
        static_graph=False,
        delay_all_reduce_named_params=[("0.weight", module[0].weight)],
        param_to_hook_all_reduce=module[2].weight,
        mixed_precision=None,
        device_mesh=None,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb_list=[1, 2],
        batched_grad_copy=True,
        forward_sync_buffers=True,
    )
    train(context, model)


@scenario(compare=False)
def names_the_first_difference_between_models(context: Context) -> Any:
    for ours, theirs, words in [
        (nn.Linear(8, 4), nn.Linear(8, 5), ("weight", "[4, 8]", "[5, 8]")),
        (nn.Linear(8, 4), nn.Linear(8, 4).double(), ("weight", "float32", "float64")),
        (nn.Linear(8, 4), nn.Linear(8, 4, bias=False), ("only worker 0 has", "bias")),
        (nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), ("running_mean",)),
        (mlp(), nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), ("2.weight", "1.weight")),
    ]:
        with raises("SchemaMismatchError", "worker 1", *words):
            context.wrap(theirs if context.rank else ours)
    frozen = nn.Linear(8, 4)
    frozen.bias.requires_grad_(context.rank == 0)
    with raises("SchemaMismatchError", "bias", "trainable"):
        context.wrap(frozen)


@scenario(compare=False)
def refuses_a_model_converted_after_wrapping(context: Context) -> Any:
    model = context.wrap(mlp())
    model.double()
    with raises(ValueError, "was torch.float32", "before wrapping"):
        model(context.inputs(0, 4, 8).double()).sum().backward()


@scenario(compare=False)
def refuses_buffers_of_other_shapes(context: Context) -> Any:
    module = nn.BatchNorm1d(8)
    model = context.wrap(module)
    module.running_mean = torch.zeros(9)
    with raises(ValueError, "buffers changed"):
        model(context.inputs(0, 4, 8))


@scenario(compare=False)
def a_dropped_wrapper_leaves_the_module_usable(context: Context) -> Any:
    module = mlp()
    model = context.wrap(module)
    reference = weakref.ref(model)
    train(context, model)
    del model
    gc.collect()
    assert reference() is None
    module.zero_grad()
    module(context.inputs(0, 4, 8)).sum().backward()  # stays local
    train(context, context.wrap(module))


@scenario(compare=False)
def a_closed_wrapper_says_so(context: Context) -> Any:
    model = context.wrap(mlp())
    model.close()
    model.close()
    with raises("SessionClosedError", ".module"):
        model(context.inputs(0, 4, 8))
    model.module(context.inputs(0, 4, 8)).sum().backward()


@scenario(compare=False)
def parameters_without_elements_are_left_out(context: Context) -> Any:
    module = mlp()
    module.nothing = nn.Parameter(torch.zeros(0))
    train(context, context.wrap(nn.Sequential(module)))


@scenario(compare=False)
def training_loops_may_prepare_backward_themselves(context: Context) -> Any:
    model = context.wrap(mlp())
    with model.no_sync():
        loss = model(context.inputs(0, 4, 8)).square().mean()
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([loss])
    loss.backward()
    assert_equal_on_all_workers(context, [model.module[0].bias.grad])


@scenario(compare=False)
def data_loader_processes_may_be_forked(context: Context) -> Any:
    model = context.wrap(mlp())
    data = torch.utils.data.TensorDataset(context.inputs(0, 8, 8))
    for (batch,) in torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=1, multiprocessing_context="fork"
    ):
        model.zero_grad()
        model(batch).sum().backward()


@scenario(compare=False)
def a_forked_child_cannot_train(context: Context) -> Any:
    model = context.wrap(mlp())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model(torch.ones(4, 8)).sum().backward()
            message = "nothing was raised"
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writing, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1000).startswith(b"ForkedSessionError")
    os.close(reading)
    os.close(writing)
    train(context, model)


@scenario(compare=False)
def serves_a_store_where_the_group_has_none(context: Context) -> Any:
    from coarse.torch.store import TorchStore, _serve_store

    store = TorchStore(_serve_store(dist.group.WORLD), prefix="test")
    if context.rank == 0:
        store.set("key", b"value")
    assert store.get("key", 20.0) == b"value"
    with raises(TimeoutError, "missing"):
        store.get("missing", 0.05)
    store.add("done", 1)
    dist.barrier()
    assert store.add("done", 0) == context.world_size
    dist.barrier()  # worker 0 serves until all have asked


@scenario
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

"""Scenarios of guarantees that only COARSE gives: refusals, errors that name differences, a wrapper's life cycle."""

from __future__ import annotations

import copy
import functools
import gc
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from scenario import (
    Branches,
    Checkpointed,
    Context,
    Scenario,
    assert_equal_on_all_workers,
    mlp,
    raises,
    scenario,
    train,
    train_in_one_backward,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

CONTRACT_SCENARIOS: dict[str, Scenario] = {}

contract = functools.partial(scenario, registry=CONTRACT_SCENARIOS, compare=False)


@contract
def is_a_torch_ddp_without_a_reducer(context: Context) -> Any:
    model = context.wrap(mlp())
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert model._get_ddp_logging_data()["world_size"] == context.world_size
    assert model.broadcast_buffers
    assert model.forward_sync_buffers
    with raises(AttributeError, "reducer._get_zeros_like_grad_buckets"):
        model.reducer._get_zeros_like_grad_buckets()


@contract
def gradients_live_in_registered_memory(context: Context) -> Any:
    model = context.wrap(mlp())
    addresses = set()
    for step in range(3):
        model.zero_grad()
        model(context.inputs(step, 4, 8)).sum().backward()
        addresses.add(model.module[0].weight.grad.data_ptr())
    assert len(addresses) == 1


@contract
def a_model_that_becomes_narrower_and_wide_again_has_averages(context: Context) -> Any:
    """Both changes move its gradients to other memory; torch's class does not average them afterwards."""
    model, alone = context.wrap(mlp()), mlp()
    alone.load_state_dict(model.module.state_dict())
    for step in range(4):
        gradients = []
        for each in (model, alone):
            each.zero_grad()
            each(context.inputs(step, 4, 8)).square().mean().backward()
            gradients.append([parameter.grad.clone() for parameter in each.parameters()])
            if step == 1:
                each.half()
                each.float()
        for average, own in zip(*gradients, strict=True):
            dist.all_reduce(own)
            torch.testing.assert_close(average, own / context.world_size)


@contract
def names_parameters_without_gradient(context: Context) -> Any:
    model = context.wrap(Branches())
    model(context.inputs(0, 4, 8)).sum().backward()
    for _ in range(2):
        with raises(RuntimeError, "heads.1.weight, heads.1.bias", "find_unused_parameters=True", "2 of 6"):
            model(context.inputs(1, 4, 8))
    with raises(RuntimeError, "heads.1.weight"):
        model._check_reducer_finalized()
    with raises(RuntimeError, "heads.1.weight"):
        model.reducer.prepare_for_backward([])  # as accelerate's trigger_sync_in_backward() does


@contract
def names_parameters_that_fire_twice(context: Context) -> Any:
    module = Checkpointed(reentrant=True, times=2)
    module.unused.requires_grad_(False)
    model = context.wrap(module)
    with raises(RuntimeError, "layer.0", "twice", "static_graph=True"):
        train(context, model)


@contract
def a_hook_that_takes_a_gradient_away_is_refused(context: Context) -> Any:
    model = context.wrap(mlp())

    def take(parameter: nn.Parameter) -> None:
        parameter.grad = None

    model.module[0].weight.register_post_accumulate_grad_hook(take)
    with raises(RuntimeError, "a hook of parameter '0.weight'", "between backward() and step()"):
        model(context.inputs(0, 4, 8)).sum().backward()


@contract
def shallow_copies_are_refused(context: Context) -> Any:
    with raises(TypeError, "copy.deepcopy(model)"):
        copy.copy(context.wrap(mlp()))


@contract
def copies_of_models_cost_nothing_before_they_train(context: Context) -> Any:
    model = context.wrap(mlp())
    twin = copy.deepcopy(model)
    assert twin._gradients is None
    with torch.no_grad():
        twin(context.inputs(0, 4, 8))
    with twin.no_sync():
        twin(context.inputs(0, 4, 8)).sum().backward()
    assert twin._gradients is None
    twin(context.inputs(1, 4, 8)).sum().backward()
    assert twin._gradients is not None
    assert_equal_on_all_workers(context, [parameter.grad for parameter in twin.parameters()])


def use_two_models_in_any_order(
    context: Context, make: Callable[[], nn.Module], inputs: Callable[[int], Any], **options: Any
) -> Any:
    """Workers that end the backward passes of two models in different orders do not deadlock."""
    trained = []
    for reverses in (False, True):
        torch.manual_seed(0)
        models = [context.wrap(make(), **options) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        trained.append(train_in_one_backward(context, models, optimizers, reverses=reverses, inputs=inputs))
    assert all(map(torch.equal, *trained))
    assert_equal_on_all_workers(context, trained[1])


@contract
def two_models_end_in_any_order(context: Context) -> Any:
    use_two_models_in_any_order(context, mlp, lambda step: (context.inputs(step, 4, 8),))


@contract
def two_models_with_unused_parameters_end_in_any_order(context: Context) -> Any:
    def inputs(step: int) -> Any:
        return context.inputs(step, 4, 8), (step + context.rank) % 2

    use_two_models_in_any_order(context, Branches, inputs, find_unused_parameters=True)


@contract
def two_models_with_static_graphs_end_in_any_order(context: Context) -> Any:
    use_two_models_in_any_order(context, mlp, lambda step: (context.inputs(step, 4, 8),), static_graph=True)


@contract
def two_models_with_tables_end_in_any_order(context: Context) -> Any:
    def inputs(step: int) -> Any:
        return (torch.tensor([[step, 3 + context.rank]], device=context.device),)

    use_two_models_in_any_order(
        context, lambda: nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 4)), inputs
    )


@contract
def a_parameter_that_two_models_average_in_one_backward_is_refused(context: Context) -> Any:
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.ones(4))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner(inputs) * self.scale

    shared = mlp()
    one, other = context.wrap(shared), context.wrap(Scaled(shared))
    inputs = context.inputs(0, 4, 8)
    for model in (one, other):
        train(context, model)
    with raises(
        RuntimeError, "another DistributedDataParallel", "inner.2.bias", "one wrapped model after the other"
    ):
        (one(inputs) + other(inputs)).sum().backward()
    del one, other, model
    gc.collect()
    train(context, context.wrap(shared))


@contract
def a_hook_that_takes_the_gradient_away_is_named(context: Context) -> Any:
    model = context.wrap(mlp())
    model.module[2].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with raises(RuntimeError, "a hook of parameter '2.bias'", "between backward() and step()"):
        model(context.inputs(0, 4, 8)).sum().backward()


@contract
def static_graph_notices_changes(context: Context) -> Any:
    model = context.wrap(Branches(), static_graph=True)
    train(context, model, head=0)
    with raises(RuntimeError, "heads.1", "graph has changed"):
        train(context, model, head=1)


@contract
def averages_what_accumulated_although_nobody_uses_it(context: Context) -> Any:
    model = context.wrap(Branches(), find_unused_parameters=True)
    with model.no_sync():
        model(context.inputs(0, 4, 8), head=1).sum().backward()
    local = model.module.heads[1].bias.grad.clone()
    dist.all_reduce(local)
    model(context.inputs(1, 4, 8), head=0).sum().backward()
    assert torch.equal(model.module.heads[1].bias.grad, local / 2)


@contract
def re_entrant_checkpointing_finds_unused(context: Context) -> Any:
    model = context.wrap(Checkpointed(reentrant=True), find_unused_parameters=True)
    result = train(context, model)
    assert result["module.unused.weight.grad"] is None
    assert_equal_on_all_workers(context, model.parameters())


@contract
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


@contract
def refuses_what_it_cannot_average(context: Context) -> Any:
    with raises(ValueError, "weight", "float8_e4m3fn", "torch.float32"):
        context.wrap(nn.Linear(2, 2).to(torch.float8_e4m3fn))
    with raises(TypeError, "not a list"):
        context.wrap([nn.Parameter(torch.ones(2))])
    with raises(ValueError, "on the meta device"):
        context.wrap(nn.Linear(2, 2, device="meta"))
    wrapped = context.wrap(nn.Linear(2, 2))
    for again in (wrapped, nn.Sequential(wrapped)):
        with raises(ValueError, "already wraps", "averaged twice"):
            context.wrap(again)
    model = context.wrap(nn.Sequential(nn.Linear(2, 2)))
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    model.module.load_state_dict(state)
    with raises(RuntimeError, "'0.weight' and 1 more", "assign=True"):
        model.module.load_state_dict(state, assign=True)
    module = model.module
    model.close()
    module.load_state_dict(state, assign=True)  # it averages nothing any more
    with raises(RuntimeError, "uninitialized"):
        context.wrap(nn.LazyLinear(3))
    with raises(RuntimeError, "requires a gradient"):
        context.wrap(nn.Linear(2, 2).requires_grad_(False))
    with raises(ValueError, "SyncBatchNorm"):
        context.wrap(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


@contract
def layers_that_are_thawed_later_are_averaged(context: Context) -> Any:
    module, reference = mlp(), mlp()
    reference.load_state_dict(module.state_dict())
    module[0].requires_grad_(False)
    model, expected = context.wrap(module), nn.parallel.DistributedDataParallel(reference)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, reference)]
    for step in range(4):
        if step == 2:
            module[0].requires_grad_(True)
        for each, optimizer in zip((model, expected), optimizers, strict=True):
            optimizer.zero_grad()
            each(context.inputs(step, 4, 8)).square().sum().backward()
            if step < 2:
                each.module[0].zero_grad()
            optimizer.step()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@contract
def layers_that_are_thawed_on_one_worker_alone_are_refused(context: Context) -> Any:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    module[:2].requires_grad_(False)
    model = context.wrap(module)
    module[context.rank % 2].requires_grad_(True)
    with raises("SchemaMismatchError", "worker 0 has", "worker 1 has", "trainable"):
        model(context.inputs(0, 4, 8))


@contract
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


@contract
def refuses_hooks_and_says_what_to_do(context: Context) -> Any:
    model = context.wrap(mlp())
    for call, words in [
        (lambda: model._register_builtin_comm_hook(None), "fp16_compress_hook and bf16_compress_hook"),
        (lambda: model._register_buffer_comm_hook(None, lambda state, buffers: None), "forward_sync_buffers"),
        (lambda: model._register_fused_optim(torch.optim.SGD, 0.1), "after backward"),
        (lambda: model._update_process_group(None), "Wrap model.module again"),
    ]:
        with raises(NotImplementedError, words):
            call()


@contract
def a_layer_that_one_worker_alone_thaws_is_named(context: Context) -> Any:
    group = dist.new_group([0, 1])  # its session has ended then
    module = mlp()
    module[0].requires_grad_(False)
    model = context.wrap(module, process_group=group)
    if context.rank == 0:
        model.session.limit_waits(0.5)
        module[0].requires_grad_(True)
        with raises(
            "SyncTimeoutError", "'0.weight' and 1 more require gradients", "on all workers before the same"
        ):
            model(context.inputs(0, 4, 8))
    dist.barrier()


@contract
def hooks_that_average_keep_the_rest_on_the_workers(context: Context) -> Any:
    from coarse.torch import DistributedOptimizer

    model = context.wrap(mlp())
    with raises(TypeError, "a communication hook is called with its state and a bucket", "'bf16'"):
        model.register_comm_hook(None, "bf16")
    model.register_comm_hook(None, lambda state, bucket: None)
    with (
        raises(
            ValueError, "join() cannot be combined with a communication hook", "the same number of batches"
        ),
        model.join(),
    ):
        pass
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert "a communication hook averages gradients instead of" in str(caught[0].message)
    assert "COARSE_NODE_COMPRESSION=bf16, fp16 or int8" in str(caught[0].message)
    model = context.wrap(nn.Embedding(8, 4, sparse=True))
    with raises(ValueError, "dense gradients", "sparse=False", "bf16_compress_hook"):
        model.register_comm_hook(None, lambda state, bucket: None)


@contract
def narrow_gradients_are_rounded_added_in_float32_and_rounded(context: Context) -> Any:
    module = nn.Sequential(nn.Linear(64, 33).to(torch.bfloat16), nn.Linear(33, 64), nn.Linear(64, 4).double())
    model = context.wrap(module)
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    local = [torch.randn_like(parameter) for parameter in module.parameters()]
    loss = sum((p * g).double().sum() for p, g in zip(module.parameters(), local, strict=True))
    model._gradients.expect(loss)
    loss.backward()
    for parameter, gradient in zip(module.parameters(), local, strict=True):
        contributions = [torch.empty_like(gradient) for _ in range(context.world_size)]
        dist.all_gather(contributions, gradient)
        total = torch.zeros_like(gradient, dtype=torch.float32)
        for contribution in contributions:
            total += contribution.to(torch.bfloat16).float()
        expected = (total / context.world_size).to(torch.bfloat16).to(parameter.dtype)
        assert parameter.grad.dtype is parameter.dtype
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=0)


@contract
def a_second_hook_is_refused(context: Context) -> Any:
    model = context.wrap(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with raises(RuntimeError, "already has a communication hook"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)


@contract
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


@contract
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


@contract
def refuses_a_model_converted_after_wrapping(context: Context) -> Any:
    model = context.wrap(mlp())
    model.double()
    with raises(ValueError, "was torch.float32", "before wrapping"):
        model(context.inputs(0, 4, 8).double()).sum().backward()


@contract
def refuses_buffers_of_other_shapes(context: Context) -> Any:
    module = nn.BatchNorm1d(8)
    model = context.wrap(module)
    module.running_mean = torch.zeros(9)
    with raises(ValueError, "buffers changed"):
        model(context.inputs(0, 4, 8))


@contract
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


@contract
def a_closed_wrapper_says_so(context: Context) -> Any:
    model = context.wrap(mlp())
    model.close()
    model.close()
    with raises("SessionClosedError", ".module"):
        model(context.inputs(0, 4, 8))
    model.module(context.inputs(0, 4, 8)).sum().backward()


@contract
def parameters_without_elements_are_left_out(context: Context) -> Any:
    module = mlp()
    module.nothing = nn.Parameter(torch.zeros(0))
    train(context, context.wrap(nn.Sequential(module)))


@contract
def training_loops_may_prepare_backward_themselves(context: Context) -> Any:
    model = context.wrap(mlp())
    with model.no_sync():
        loss = model(context.inputs(0, 4, 8)).square().mean()
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([loss])
    loss.backward()
    assert_equal_on_all_workers(context, [model.module[0].bias.grad])


@contract
def data_loader_processes_may_be_forked(context: Context) -> Any:
    model = context.wrap(mlp())
    data = torch.utils.data.TensorDataset(context.inputs(0, 8, 8))
    for (batch,) in torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=1, multiprocessing_context="fork"
    ):
        model.zero_grad()
        model(batch).sum().backward()


@contract
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


@contract
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

"""Scenarios of layers with sparse gradients: only rows are sent.

The expected results are averaged by hand, because torch DDP divides sparse gradients more than once in models with
several parameters (seen with 2.13).
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from scenario import Context, Scenario, assert_equal_on_all_workers, raises, scenario
from torch import nn

TABLE_SCENARIOS: dict[str, Scenario] = {}
NUM_ROWS, WIDTH = 3000, 5
STEPS = 40
# Moments of torch's SparseAdam are rounded once more.
TOLERANCE = 2e-6


class Lookup(nn.Module):
    """Two tables, one of which has no rows in some steps, and something dense after them."""

    def __init__(self, *, layer: type[nn.Module] = nn.Embedding, **arguments: Any) -> None:
        super().__init__()
        self.words = layer(NUM_ROWS, WIDTH, sparse=True, **arguments)
        self.places = nn.Embedding(300, WIDTH, sparse=True, dtype=arguments.get("dtype"))
        self.after = nn.Linear(WIDTH, 3, dtype=arguments.get("dtype"))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = self.words(tokens)
        hidden = (words if words.dim() == 2 else words.sum(1)) + self.places(tokens[:, 0] % 300)
        return torch.tanh(self.after(hidden))


class OnlyTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_ROWS, WIDTH, sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens).sum(1).sin()


def tokens_of(context: Context, step: int) -> torch.Tensor:
    """Different ones on each worker and in each step, some of them several times."""
    generator = torch.Generator().manual_seed(100 * context.rank + step)
    return torch.randint(0, 400, (8, 6), generator=generator).square() % NUM_ROWS


def dense(module: nn.Module) -> dict[str, Any]:
    """Parameters and gradients, sparse ones with their numbers."""
    found: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        found[name] = parameter.detach().clone()
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.coalesce()
            found[f"{name}.rows"] = gradient.indices()[0].clone()
            gradient = gradient.values()
        found[f"{name}.grad"] = None if gradient is None else gradient.detach().clone()
    return found


def wrap(context: Context, module: nn.Module, **options: Any) -> Any:
    return context.wrap(module, **options) if context.is_coarse else module


def backward(context: Context, module: nn.Module, loss: torch.Tensor) -> None:
    """Leaves averaged gradients: under torch, sparse ones are summed up by gloo."""
    loss.backward()
    for parameter in module.parameters() if not context.is_coarse else ():
        gradient = parameter.grad.coalesce() if parameter.grad.is_sparse else parameter.grad
        dist.all_reduce(gradient)
        parameter.grad = gradient / context.world_size


def loss_of(model: Any, context: Context, step: int) -> torch.Tensor:
    return (model(tokens_of(context, step)).float() - 0.3).square().mean()


def train(context: Context, module: nn.Module, *, zeroed: bool = False, **options: Any) -> Any:
    model = wrap(context, module, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    results = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=not zeroed)
        backward(context, module, loss_of(model, context, step))
        results.append(dense(module))
        optimizer.step()
    return results


def table_scenario(function: Any = None, **arguments: Any) -> Any:
    return scenario(function, registry=TABLE_SCENARIOS, **{"tolerance": TOLERANCE, **arguments})


@table_scenario
def rows_are_averaged(context: Context) -> Any:
    return train(context, Lookup())


@table_scenario
def rows_of_bags_are_averaged(context: Context) -> Any:
    return train(context, Lookup(layer=nn.EmbeddingBag, mode="sum"))


@table_scenario
def rows_without_padding(context: Context) -> Any:
    return train(context, Lookup(padding_idx=0))


@table_scenario
def rows_of_float64(context: Context) -> Any:
    return train(context, Lookup(dtype=torch.float64))


@table_scenario
def rows_in_gradients_of_their_own(context: Context) -> Any:
    return train(context, Lookup(), gradient_as_bucket_view=False)


@table_scenario
def rows_zeroed_in_place(context: Context) -> Any:
    return train(context, Lookup(), zeroed=True)


@table_scenario
def rows_of_a_model_of_tables_alone(context: Context) -> Any:
    return train(context, OnlyTables())


@table_scenario
def rows_that_accumulate(context: Context) -> Any:
    module = Lookup()
    model = wrap(context, module)
    with model.no_sync() if context.is_coarse else contextlib.nullcontext():
        loss_of(model, context, 0).backward()
    backward(context, module, loss_of(model, context, 1))
    backward(context, module, loss_of(model, context, 2))  # on top of the average
    return dense(module)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "sgd_that_maximises": lambda p: torch.optim.SGD(p, lr=1e-3, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.01, betas=(0.8, 0.99)),
}


def offload(context: Context, optimizer: Any, model: Any, **options: Any) -> Any:
    if not context.is_coarse:
        return optimizer
    from coarse.torch import DistributedOptimizer

    distributed = DistributedOptimizer(optimizer, model, **options)
    assert distributed.runs_in_memory_devices
    return distributed


def run_optimizer(context: Context, name: str, *, overlap: bool) -> Any:
    module = OnlyTables() if name == "sparse_adam" else Lookup()
    model = wrap(context, module)
    optimizer = offload(context, OPTIMIZERS[name](model.parameters()), model, overlap=overlap)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(context, module, loss_of(model, context, step))
        optimizer.step()
        schedule.step()
    assert_equal_on_all_workers(context, module.parameters())
    saved = optimizer.state_dict()
    return {
        "parameters": [parameter.detach().clone() for parameter in module.parameters()],
        "state": {str(key): dict(value) for key, value in saved["state"].items()},
    }


for _name in OPTIMIZERS:
    for _overlap in (False, True):

        def _run(context: Context, _name: str = _name, _overlap: bool = _overlap) -> Any:
            return run_optimizer(context, _name, overlap=_overlap)

        TABLE_SCENARIOS[f"rows_by_{_name}_{'overlapped' if _overlap else 'in_step'}"] = Scenario(
            _run, True, TOLERANCE
        )


@table_scenario
def gradients_that_were_replaced_update(context: Context) -> Any:
    module = Lookup()
    model = wrap(context, module)
    optimizer = offload(context, torch.optim.SGD(model.parameters(), lr=0.5), model)
    for step in range(3):
        optimizer.zero_grad()
        backward(context, module, loss_of(model, context, step))
        module.words.weight.grad = module.words.weight.grad * 0.5
        module.places.weight.grad.mul_(0.25)
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


@table_scenario
def states_go_on_where_they_were_saved(context: Context) -> Any:
    module = OnlyTables()
    model = wrap(context, module)
    optimizer = offload(context, torch.optim.SparseAdam(list(model.parameters()), lr=0.01), model)
    for step in range(6):
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        backward(context, module, loss_of(model, context, step))
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


@table_scenario
def norms_count_rows(context: Context) -> Any:
    module = Lookup()
    model = wrap(context, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if context.is_coarse:
        optimizer = offload(context, optimizer, model, max_grad_norm=0.01)
    for step in range(3):
        optimizer.zero_grad()
        backward(context, module, loss_of(model, context, step))
        if not context.is_coarse:
            gradients = [
                p.grad.coalesce()._values() if p.grad.is_sparse else p.grad for p in module.parameters()
            ]
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for parameter in module.parameters():
                parameter.grad = parameter.grad * (0.01 / (norm + 1e-6)).clamp(max=1)
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


@table_scenario(compare=False)
def only_rows_travel(context: Context) -> Any:
    module = Lookup()
    model = wrap(context, module)
    backward(context, module, loss_of(model, context, 0))
    gradient = module.words.weight.grad
    assert gradient.is_coalesced()
    assert 0 < gradient._nnz() < 100
    rows = model._gradients.rest.group.rows
    index = [name for name, _ in model.trained_parameters].index("words.weight")
    assert (
        gradient._values().data_ptr()
        == torch.frombuffer(rows.mean(index).values, dtype=torch.float32).data_ptr()
    )
    with torch.device("meta"):  # as torch.set_default_device() has it
        assert torch.equal(model._gradients.rest._sparse.mean(index)._values(), gradient._values())


@table_scenario(compare=False)
def a_hundredth_of_a_table_takes_a_hundredth_of_its_traffic(context: Context) -> Any:
    module = nn.Embedding(100_000, 64, sparse=True)
    model = wrap(context, module)
    tokens = (torch.arange(1000) * 97 + 13 * context.rank) % 100_000
    model(tokens).sum().backward()
    # Each byte of a contribution and of the mean lies there once: nothing else travels.
    assert 10 * model._gradients.rest.group.rows.taken_bytes < 2 * module.weight.nbytes
    assert module.weight.grad._nnz() == 2000


@table_scenario(compare=False)
def pushed_rows_are_counted_in_bytes(context: Context) -> Any:
    def pushed() -> float:
        return model.session.metrics().total("coarse_pushed_bytes_total", worker=str(context.rank))

    module = Lookup()
    model = wrap(context, module)
    before = pushed()
    backward(context, module, loss_of(model, context, 0))
    tokens = tokens_of(context, 0)
    num_rows = len(tokens.unique()) + len((tokens[:, 0] % 300).unique())
    dense_bytes = sum(parameter.nbytes for parameter in module.after.parameters())
    counts_bytes = 2 * 8  # the numbers of rows of both tables are added up first
    assert pushed() - before == num_rows * (8 + 4 * WIDTH) + dense_bytes + counts_bytes


@table_scenario(compare=False)
def what_does_not_go_with_rows_is_refused(context: Context) -> Any:
    from coarse.torch import DistributedOptimizer

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 4, sparse=True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.table(tokens), self.table.weight)

    tied = context.wrap(Tied())
    with raises(ValueError, "table.weight", "sparse=False"):
        tied(torch.tensor([[1]])).sum().backward()
    model = context.wrap(Lookup())
    with raises(ValueError, "sparse=True"), model.join():
        pass
    for optimizer, words in (
        (torch.optim.AdamW(model.parameters()), "AdamW does not update parameters by rows"),
        (torch.optim.SGD(model.parameters(), lr=1, momentum=0.9), "momentum=0.9"),
        (torch.optim.SparseAdam(list(model.parameters())), "updates only sparse parameters"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not DistributedOptimizer(optimizer, model).runs_in_memory_devices
        assert words in str(caught[0].message), caught[0].message


@table_scenario(compare=False)
def tables_train_after_their_snapshot_was_taken(context: Context) -> Any:
    """What a snapshot refers to is what the table was then, of touched and untouched rows alike."""
    module = OnlyTables()
    model = wrap(context, module)
    optimizer = offload(context, torch.optim.Adagrad(model.parameters(), lr=0.1), model)
    backward(context, module, loss_of(model, context, 0))
    optimizer.step()
    expected = module.words.weight.detach().clone()
    if context.rank == 0:
        snapshot = optimizer.remote_parameters.snapshot()
    for step in range(1, 4):
        optimizer.zero_grad()
        backward(context, module, loss_of(model, context, step))
        optimizer.step()
    assert not torch.equal(module.words.weight, expected)
    if context.rank == 0:
        kept = torch.frombuffer(bytearray(snapshot.read(0, 0)), dtype=torch.float32)
        assert torch.equal(kept.view_as(expected), expected)
        snapshot.release()


def interrupted(context: Context, folder: str, *, offloads: bool, name: str) -> None:
    """Trains six steps, of which the last three once more by a model that the checkpoint between them restores."""
    from coarse.torch.checkpoint import Checkpointer

    ends = []
    for first in (0, 3):
        torch.manual_seed(first)
        module = OnlyTables() if name == "sparse_adam" else Lookup()
        model = context.wrap(module)
        optimizer = OPTIMIZERS[name](model.parameters())
        if offloads:
            optimizer = offload(context, optimizer, model)
        with Checkpointer(folder, model, optimizer) as checkpointer:
            assert checkpointer.restore() == first
            for step in range(first, 6):
                optimizer.zero_grad()
                loss_of(model, context, step).backward()
                optimizer.step()
                checkpointer.step()
                if step == 2:
                    checkpointer.save()
        ends.append([parameter.detach().clone() for parameter in module.parameters()])
        model.close()
    assert all(torch.equal(uninterrupted, restored) for uninterrupted, restored in zip(*ends, strict=True))


for _name, _offloads in (("adagrad", True), ("adagrad", False), ("sparse_adam", True)):

    def _interrupt(context: Context, _name: str = _name, _offloads: bool = _offloads) -> None:
        from checkpoint_scenarios import shared_folder

        with shared_folder(context) as folder:
            interrupted(context, folder, offloads=_offloads, name=_name)

    _where = "memory devices" if _offloads else "workers"
    TABLE_SCENARIOS[f"{_name} on {_where} goes on from a checkpoint"] = Scenario(_interrupt, False, 0.0)

"""Scenarios of embedding tables so large that their gradients are written directly into slots."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from scenario import Context, Scenario, raises, scenario, states
from torch import nn
from torch.utils.checkpoint import checkpoint

EMBEDDING_SCENARIOS: dict[str, Scenario] = {}
NUM_ROWS, WIDTH = 5000, 64


class Table(nn.Module):
    """A table of 1.2 MiB, looked up `times` times, and something after it."""

    def __init__(self, *, times: int = 1, checkpointed: str = "", **arguments: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, WIDTH, **arguments)
        self.after = nn.Linear(WIDTH, 3, dtype=arguments.get("dtype"))
        self.times = times
        self.checkpointed = checkpointed

    def look_up(self, tokens: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).mul_(2) * anchor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        anchor = torch.ones((), requires_grad=True)
        found = []
        for i in range(self.times):
            part = tokens + i
            found.append(
                checkpoint(self.look_up, part, anchor, use_reentrant=self.checkpointed == "reentrant")
                if self.checkpointed
                else self.look_up(part, anchor)
            )
        return self.after(torch.stack(found).sum(0).mean(1).to(self.after.weight.dtype))


def tokens_of(context: Context, step: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Different tokens on each worker and in each step, some repeated, some 0."""
    generator = torch.Generator().manual_seed(100 * context.rank + step)
    return torch.randint(0, 40, (4, 50), generator=generator).to(dtype)


def train(
    context: Context,
    model: nn.Module,
    *,
    dtype: torch.dtype = torch.int64,
    set_to_none: bool = True,
    backward_every: int = 1,
) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(backward_every):
            model(tokens_of(context, 10 * step + part, dtype)).float().square().mean().backward()
        optimizer.step()
    return states(model)


def embedding_scenario(function: Any = None, **arguments: Any) -> Any:
    return scenario(function, registry=EMBEDDING_SCENARIOS, **arguments)


@embedding_scenario
def table_with_repeated_rows(context: Context) -> Any:
    return train(context, context.wrap(Table()))


@embedding_scenario
def table_with_padding(context: Context) -> Any:
    return train(context, context.wrap(Table(padding_idx=0)))


@embedding_scenario
def table_with_rows_of_limited_norm(context: Context) -> Any:
    return train(context, context.wrap(Table(max_norm=1.0)))


@embedding_scenario
def table_scaled_by_frequency(context: Context) -> Any:
    return train(context, context.wrap(Table(scale_grad_by_freq=True)))


@embedding_scenario
def table_looked_up_several_times(context: Context) -> Any:
    return train(context, context.wrap(Table(times=3)))


@embedding_scenario
def table_with_32_bit_indices(context: Context) -> Any:
    return train(context, context.wrap(Table()), dtype=torch.int32)


@embedding_scenario
def table_of_float64(context: Context) -> Any:
    return train(context, context.wrap(Table(dtype=torch.float64)))


@embedding_scenario
def table_of_bfloat16(context: Context) -> Any:
    return train(context, context.wrap(Table(dtype=torch.bfloat16, padding_idx=0)))


@embedding_scenario
def table_with_gradients_of_its_own(context: Context) -> Any:
    return train(context, context.wrap(Table(), gradient_as_bucket_view=False))


@embedding_scenario
def table_with_gradients_zeroed_in_place(context: Context) -> Any:
    return train(context, context.wrap(Table()), set_to_none=False)


@embedding_scenario
def table_that_accumulates_over_synchronised_steps(context: Context) -> Any:
    return train(context, context.wrap(Table()), backward_every=2)


@embedding_scenario
def table_in_a_static_graph(context: Context) -> Any:
    return train(context, context.wrap(Table(times=2), static_graph=True))


@embedding_scenario
def table_checkpointed_without_reentry(context: Context) -> Any:
    return train(context, context.wrap(Table(checkpointed="plain")))


@embedding_scenario
def table_checkpointed_with_reentry(context: Context) -> Any:
    return train(context, context.wrap(Table(checkpointed="reentrant")))


@embedding_scenario
def table_under_no_sync(context: Context) -> Any:
    model = context.wrap(Table())
    with model.no_sync():
        model(tokens_of(context, 0)).sum().backward()
    local = states(model)
    model(tokens_of(context, 1)).square().sum().backward()
    return local, states(model)


@embedding_scenario
def table_in_two_forwards_before_one_backward(context: Context) -> Any:
    model = context.wrap(Table())
    (model(tokens_of(context, 0)).sum() + model(tokens_of(context, 1)).square().sum()).backward()
    return states(model)


@embedding_scenario
def table_in_a_second_backward_that_stays_local(context: Context) -> Any:
    model = context.wrap(Table())
    loss = model(tokens_of(context, 0)).square().sum()
    loss.backward(retain_graph=True)
    averaged = states(model)
    loss.backward()
    return averaged, states(model)


@embedding_scenario
def table_that_some_workers_leave_out(context: Context) -> Any:
    class Optional(Table):
        def forward(self, tokens: torch.Tensor, *, use: bool) -> torch.Tensor:
            return super().forward(tokens) if use else self.after(torch.ones(4, WIDTH))

    model = context.wrap(Optional(), find_unused_parameters=True)
    results = []
    for step in range(3):
        model.zero_grad()
        model(tokens_of(context, step), use=step != context.rank).square().sum().backward()
        results.append(states(model))
    return results


@embedding_scenario
def table_whose_gradient_is_changed_by_a_hook(context: Context) -> Any:
    module = Table()
    module.table.weight.register_hook(lambda gradient: gradient * 3)
    return train(context, context.wrap(module))


@embedding_scenario
def table_whose_rows_are_changed_by_a_hook(context: Context) -> Any:
    module = Table()
    module.table.register_forward_hook(lambda table, arguments, rows: rows.tanh_() * 2)
    return train(context, context.wrap(module))


@embedding_scenario
def table_tied_to_the_output(context: Context) -> Any:
    class Tied(Table):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return (
                nn.functional.linear(self.table(tokens).mean(1), self.table.weight[:7])
                + self.after.bias.sum()
            )

    module = Tied()
    module.after.weight.requires_grad_(False)
    return train(context, context.wrap(module))


class TiedLinear(nn.Module):
    """A table whose weight a Linear uses as well, as a language model's output does."""

    def __init__(self, *, times: int = 1, bias: bool = False, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, WIDTH, padding_idx=padding_idx)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_ROWS, bias=bias)
        self.head.weight = self.table.weight
        self.times = times

    def forward(self, tokens: torch.Tensor, *, use_head: bool = True, use_table: bool = True) -> torch.Tensor:
        found = torch.stack([self.table(tokens + i) for i in range(self.times)]).sum(0)
        hidden = self.between(found if use_table else found.detach())
        return (self.head(hidden) if use_head else hidden).float().tanh()


@embedding_scenario
def table_tied_to_a_linear(context: Context) -> Any:
    return train(context, context.wrap(TiedLinear()))


@embedding_scenario
def table_with_padding_tied_to_a_linear_with_bias(context: Context) -> Any:
    return train(context, context.wrap(TiedLinear(bias=True, padding_idx=3)))


@embedding_scenario
def tied_table_looked_up_several_times(context: Context) -> Any:
    return train(context, context.wrap(TiedLinear(times=3)))


@embedding_scenario
def tied_table_in_bfloat16(context: Context) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return train(context, context.wrap(TiedLinear()))


@embedding_scenario
def tied_table_with_gradients_zeroed_in_place(context: Context) -> Any:
    return train(context, context.wrap(TiedLinear()), set_to_none=False)


@embedding_scenario
def tied_table_that_accumulates_over_synchronised_steps(context: Context) -> Any:
    return train(context, context.wrap(TiedLinear()), backward_every=2)


@embedding_scenario
def tied_table_in_a_static_graph(context: Context) -> Any:
    return train(context, context.wrap(TiedLinear(), static_graph=True))


@embedding_scenario
def tied_table_whose_gradient_is_changed_by_a_hook(context: Context) -> Any:
    module = TiedLinear()
    module.table.weight.register_hook(lambda gradient: gradient * 3)
    return train(context, context.wrap(module))


@embedding_scenario
def tied_table_under_no_sync(context: Context) -> Any:
    model = context.wrap(TiedLinear())
    with model.no_sync():
        model(tokens_of(context, 0)).sum().backward()
    local = states(model)
    model(tokens_of(context, 1)).square().sum().backward()
    return local, states(model)


@embedding_scenario
def tied_table_whose_uses_change_from_step_to_step(context: Context) -> Any:
    model = context.wrap(TiedLinear(), find_unused_parameters=True)
    results = []
    for step, (use_head, use_table) in enumerate([(True, True), (False, True), (True, False), (True, True)]):
        model.zero_grad()
        model(tokens_of(context, step), use_head=use_head, use_table=use_table).square().sum().backward()
        results.append(states(model))
    return results


@embedding_scenario
def tied_table_that_is_looked_up_after_the_linear(context: Context) -> Any:
    """Then the gradient of the lookup comes first."""

    class Reversed(TiedLinear):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            first = self.head(self.between(torch.ones(2, WIDTH))).tanh().sum()
            return first * self.table(tokens)

    return train(context, context.wrap(Reversed()))


@embedding_scenario
def tied_table_with_a_third_use(context: Context) -> Any:
    class Penalised(TiedLinear):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + self.table.weight.square().mean()

    return train(context, context.wrap(Penalised()))


@embedding_scenario
def tied_table_whose_gradient_is_asked_for_directly(context: Context) -> Any:
    model = context.wrap(TiedLinear())
    kept = []
    for step in range(2):
        model.zero_grad()
        loss = model(tokens_of(context, step)).square().sum()
        kept += torch.autograd.grad(loss, [model.module.table.weight], retain_graph=True)
        loss.backward()
    return kept, states(model)


@embedding_scenario(compare=False)
def rows_of_tied_tables_wait_for_the_linear(context: Context) -> Any:
    """Nothing as large as the table is made but the gradient of the Linear."""
    model = context.wrap(TiedLinear())
    for step in range(2):
        model.zero_grad()
        loss = model(tokens_of(context, step)).sum()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile:
            loss.backward()
        names = [event.name for event in profile.events()]
        assert "aten::embedding_dense_backward" not in names
        table = [NUM_ROWS, WIDTH]
        assert all(
            "add" not in event.name or table not in event.input_shapes[1:] for event in profile.events()
        )


@embedding_scenario
def table_with_a_penalty_on_its_gradient(context: Context) -> Any:
    model = context.wrap(Table())
    for step in range(2):
        model.zero_grad()
        loss = model(tokens_of(context, step)).square().sum()
        (gradient,) = torch.autograd.grad(loss, [model.module.table.weight], create_graph=True)
        (loss + gradient.square().sum()).backward()
    return states(model)


@embedding_scenario
def table_whose_gradient_is_asked_for_directly(context: Context) -> Any:
    """The result of torch.autograd.grad() belongs to the user; later steps do not change it."""
    model = context.wrap(Table())
    kept = []
    for step in range(2):
        model.zero_grad()
        loss = model(tokens_of(context, step)).square().sum()
        kept += torch.autograd.grad(loss, [model.module.table.weight], retain_graph=True)
        loss.backward()
    return kept, states(model)


@embedding_scenario
def table_compiled(context: Context) -> Any:
    return train(context, context.wrap(torch.compile(Table(), backend="aot_eager")))


@embedding_scenario(compare=False)
def gradients_of_tables_are_written_in_place(context: Context) -> Any:
    module = Table(padding_idx=0)
    came: list[int] = []
    # Registered before the module is wrapped, so that it sees what autograd has made.
    module.table.weight.register_post_accumulate_grad_hook(lambda p: came.append(p.grad.data_ptr()))
    model = context.wrap(module)
    for step in range(3):
        model.zero_grad()
        model(tokens_of(context, step)).sum().backward()
        assert came[-1] == module.table.weight.grad.data_ptr()
    assert len(came) == 3


@embedding_scenario(compare=False)
def tables_keep_nothing_of_it(context: Context) -> Any:
    model = context.wrap(Table())
    model(tokens_of(context, 0)).sum().backward()
    assert not model.module.table._forward_hooks
    copied = copy.deepcopy(model.module)
    stored = io.BytesIO()
    torch.save(copied.state_dict(), stored)
    with raises(IndexError):
        model(torch.tensor([[NUM_ROWS]]))
    assert not model.module.table._forward_hooks, "after an error either"
    copied(tokens_of(context, 1)).sum().backward()


@embedding_scenario(compare=False)
def indices_that_were_modified_are_refused(context: Context) -> Any:
    model = context.wrap(Table())
    tokens = tokens_of(context, 0)
    loss = model(tokens.clone()).sum()
    loss.backward()
    module = model.module
    module.forward = lambda indices: module.after(module.table(indices).mean(1))
    loss = model(tokens).sum()
    tokens.add_(1)
    with raises(RuntimeError, "in-place operation"):
        loss.backward()

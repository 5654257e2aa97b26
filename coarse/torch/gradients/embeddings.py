"""Gradients of embedding tables, written directly to their slots.

A table's gradient is zero except in the rows that were looked up. autograd creates a new dense tensor for it in every
backward, which would then be copied to its slot. For BERT's words, this needs 89 MiB more per worker, while all other
gradients are in memory. Here, backward clears the slot and adds the rows to it in the same order, so the result is
bitwise equal.

If a Linear uses the table as well, as in language models with tied embeddings, autograd would add the two dense
gradients into a third one. Here, the rows wait until the gradient of the Linear has come, and are added to it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_SMALLEST_TABLE_BYTES = 1 << 20

SlotOf = Callable[[torch.nn.Parameter], torch.Tensor | None]
"""Returns a new tensor over a parameter's slot; None if the whole gradient cannot be written there now."""


class EmbeddingGradients:
    """Makes the large embedding tables of a module write their gradients to slots.

    Its hooks do not stay on the module between forward passes, so the module can be copied and pickled as before.

    Args:
        module: Searched once for tables.
        slot_of: Called in backward, in the thread that runs it.
    """

    def __init__(self, module: torch.nn.Module, slot_of: SlotOf) -> None:
        self._slot_of = slot_of
        self._tables = [each for each in module.modules() if _is_suitable(each)]
        self._tied = list(_tied_to(self._tables, module))
        self._products = _Products()

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Lookups within the block write their gradients to slots."""
        # Registered before the user's hooks, so that these see the final output.
        handles = [
            table.register_forward_hook(self._on_lookup, prepend=True, with_kwargs=True)
            for table in self._tables
        ]
        handles += [linear.register_forward_hook(self._products.watch, prepend=True) for linear in self._tied]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_lookup(
        self,
        table: torch.nn.Embedding,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        output: torch.Tensor,
    ) -> torch.Tensor | None:
        if torch.compiler.is_compiling() or output.grad_fn is None or output._is_view():
            return None
        indices = arguments[0] if arguments else keywords["input"]
        # The same tensor moves from the table's own node of the graph to the node below.
        output.detach_()
        found: torch.Tensor = _Lookup.apply(
            table.weight, output, indices, table.padding_idx, self._slot_of, self._products
        )
        return found


class _Products:
    """Notes in which backward the gradient of a Linear goes to a table that it is tied to."""

    _DEEPEST = 5  # nodes from the output of a Linear to its weight, with casts and views

    def __init__(self) -> None:
        self._backward_of: dict[int, int] = {}  # by id of the table

    def watch(self, linear: torch.nn.Linear, _: object, output: torch.Tensor) -> None:
        """A forward hook."""
        if torch.compiler.is_compiling() or output.grad_fn is None:
            return
        found = self._node_before(linear.weight, [output.grad_fn])
        if found is not None:
            node, edge = found
            node.register_hook(functools.partial(self._note, id(linear.weight), edge))

    def has_come(self, table: torch.nn.Parameter) -> bool:
        """Whether the running backward has computed a gradient of a Linear for the table."""
        running: int = torch._C._current_graph_task_id()
        return self._backward_of.get(id(table)) == running

    def _note(self, table: int, edge: int, gradients: Sequence[torch.Tensor | None], _: object) -> None:
        if gradients[edge] is not None:
            self._backward_of[table] = torch._C._current_graph_task_id()

    def _node_before(self, table: torch.nn.Parameter, nodes: Sequence[Any]) -> tuple[Any, int] | None:
        """The node, and its edge, by which the output's gradient goes to the table."""
        for _ in range(self._DEEPEST):
            for node in nodes:
                for edge, (target, _) in enumerate(node.next_functions):
                    if getattr(target, "variable", None) is table:
                        return node, edge
            nodes = [
                target for node in nodes for target, _ in node.next_functions if _is_product_part(target)
            ]
        return None


class _Lookup(torch.autograd.Function):  # type: ignore[misc]
    """Passes through rows that were looked up already; changes only their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.nn.Parameter,
        found: torch.Tensor,
        indices: torch.Tensor,
        padding_idx: int | None,
        slot_of: SlotOf,
        products: _Products,
    ) -> torch.Tensor:
        ctx.mark_dirty(found)
        ctx.weight, ctx.slot_of, ctx.products = weight, slot_of, products
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        # Not saved by autograd: checkpointing counts saved tensors, and its second forward has no _Lookup.
        ctx.indices, ctx.version = indices, indices._version
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.indices._version != ctx.version:
            raise RuntimeError(
                "the indices of an embedding have been modified by an in-place operation after they were looked up; "
                "its gradient needs their original values"
            )
        accumulate = ctx.next_functions[0][0]
        # Differentiable gradients, and gradients that do not go to .grad, must not be in memory that is overwritten.
        is_plain = torch.is_grad_enabled() or gradient.dtype is not ctx.weight.dtype
        if is_plain or not _is_accumulated(accumulate):
            return _dense(ctx, gradient), None, None, None, None, None
        if ctx.products.has_come(ctx.weight) and _takes_rows(ctx.weight):
            _add_later(accumulate, *_summed(*_rows(ctx, gradient)))
            return None, None, None, None, None, None
        slot = ctx.slot_of(ctx.weight)
        if slot is None or slot.dtype is not gradient.dtype or slot.shape != ctx.weight.shape:
            return _dense(ctx, gradient), None, None, None, None, None
        numbers, rows = _rows(ctx, gradient)
        return slot.zero_().index_add_(0, numbers, rows), None, None, None, None, None


def _is_accumulated(accumulate: Any) -> bool:
    """Whether the running backward accumulates a gradient into `.grad` instead of returning it."""
    try:
        return bool(torch._C._will_engine_execute_node(accumulate))
    except RuntimeError:  # torch.autograd.grad()
        return False


def _takes_rows(weight: torch.nn.Parameter) -> bool:
    """Whether rows may be added to its gradient just before that becomes `.grad`, and nobody sees it before."""
    return weight.grad is None and not weight._backward_hooks


def _dense(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.embedding_dense_backward(
        gradient, ctx.indices, ctx.weight.shape[0], ctx.padding_idx, False
    )


def _rows(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the rows that were looked up, and their gradients."""
    rows, numbers = gradient.reshape(-1, ctx.weight.shape[1]), ctx.indices.reshape(-1)
    if ctx.padding_idx < 0:
        return numbers, rows
    is_row = numbers != ctx.padding_idx
    return numbers[is_row], rows[is_row]


def _summed(numbers: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with each number once. A dense gradient has these sums, to the last bit."""
    once, places = torch.unique(numbers, return_inverse=True)
    return once, rows.new_zeros(len(once), rows.shape[1]).index_add_(0, places, rows)


def _add_later(accumulate: Any, numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """Adds rows to the gradient that a leaf's node has when all of its parts have come."""

    def add(gradients: tuple[torch.Tensor, ...]) -> None:
        handle.remove()
        gradients[0].index_add_(0, numbers, rows)

    handle = accumulate.register_prehook(add)


def _tied_to(tables: Sequence[torch.nn.Module], module: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """The Linears of a module that use one of the tables as weight."""
    weights = {id(table.weight) for table in tables}
    for each in module.modules():
        if type(each) is torch.nn.Linear and id(each.weight) in weights:
            yield each


def _is_product_part(node: Any) -> bool:
    """Whether a node may lie between a Linear's output and its weight; a lookup does not."""
    return node is not None and getattr(node, "_forward_cls", None) is not _Lookup


def _is_suitable(module: torch.nn.Module) -> bool:
    return (
        type(module) is torch.nn.Embedding
        and not module.sparse
        and not module.scale_grad_by_freq
        and module.weight.is_cpu
        and module.weight.nbytes >= _SMALLEST_TABLE_BYTES
    )

"""Gradients of embedding tables, written directly to their slots.

A table's gradient is zero except in the rows that were looked up. autograd creates a new dense tensor for it in every
backward, which would then be copied to its slot. For BERT's words, this needs 89 MiB more per worker, while all other
gradients are in memory. Here, backward clears the slot and adds the rows to it in the same order, so the result is
bitwise equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Lookups within the block write their gradients to slots."""
        # Registered before the user's hooks, so that these see the final output.
        handles = [
            table.register_forward_hook(self._on_lookup, prepend=True, with_kwargs=True)
            for table in self._tables
        ]
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
        found: torch.Tensor = _Lookup.apply(table.weight, output, indices, table.padding_idx, self._slot_of)
        return found


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
    ) -> torch.Tensor:
        ctx.mark_dirty(found)
        ctx.weight, ctx.slot_of = weight, slot_of
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
        slot = None
        # Differentiable gradients, and gradients that do not go to .grad, must not be in memory that is overwritten.
        if not torch.is_grad_enabled() and _is_accumulated(ctx.next_functions[0][0]):
            slot = ctx.slot_of(ctx.weight)
        if slot is None or slot.dtype is not gradient.dtype or slot.shape != ctx.weight.shape:
            slot = torch.ops.aten.embedding_dense_backward(
                gradient, ctx.indices, ctx.weight.shape[0], ctx.padding_idx, False
            )
        else:
            _add_rows(slot, gradient, ctx.indices, ctx.padding_idx)
        return slot, None, None, None, None


def _is_accumulated(accumulate: Any) -> bool:
    """Whether the running backward accumulates a gradient into `.grad` instead of returning it."""
    try:
        return bool(torch._C._will_engine_execute_node(accumulate))
    except RuntimeError:  # torch.autograd.grad()
        return False


def _add_rows(slot: torch.Tensor, gradient: torch.Tensor, indices: torch.Tensor, padding_idx: int) -> None:
    rows, numbers = gradient.reshape(-1, slot.shape[1]), indices.reshape(-1)
    if padding_idx >= 0:
        is_row = numbers != padding_idx
        rows, numbers = rows[is_row], numbers[is_row]
    slot.zero_().index_add_(0, numbers, rows)


def _is_suitable(module: torch.nn.Module) -> bool:
    return (
        type(module) is torch.nn.Embedding
        and not module.sparse
        and not module.scale_grad_by_freq
        and module.weight.is_cpu
        and module.weight.nbytes >= _SMALLEST_TABLE_BYTES
    )

"""Sparse gradients, as of nn.Embedding(sparse=True): only a few rows of a huge parameter are transferred.

Rows are transferred at the end of backward, because the total number of all workers' rows determines the memory of
the mean. The lookups of an embedding usually end the backward pass anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from coarse.client.memory.row_memory import NUMBER_BYTES, RowMemory, Rows
from coarse.client.tensor_group import TensorGroup
from coarse.schema import ITEM_BYTES
from coarse.session import AnyTensorGroup, Session


class SparseGradients:
    """The sparse gradients of one wrapped model.

    Args:
        session: Session of the group.
        group: The registered group; its tensors with rows have sparse gradients.
        parameters: With their names, in the order of the group.
        gradient_as_view: Whether means stay in the memory devices' memory until the next means arrive.
    """

    def __init__(
        self,
        session: Session,
        group: AnyTensorGroup,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        gradient_as_view: bool,
    ) -> None:
        self._session = session
        self._group = group
        self._parameters = parameters
        self._gradient_as_view = gradient_as_view
        self._indices = [index for index, spec in enumerate(group.specs) if spec.row_elements]
        self._is_sparse = frozenset(self._indices)
        self.are_there = bool(self._indices)
        """Whether any gradient is sparse."""
        self._held: dict[int, torch.Tensor] = {}
        self._shard_bytes = (
            _sizes_of_shards(group) if self._indices and isinstance(group, TensorGroup) else {}
        )

    def __contains__(self, index: object) -> bool:
        return index in self._is_sparse

    def hold(self, index: int, gradient: torch.Tensor) -> None:
        """Takes a sparse gradient from backward; sums up repeated rows.

        Raises:
            ValueError: If the gradient is not sparse.
        """
        self._held[index] = self._rows_of(index, gradient)

    def stage_rows(self, *, are_averaged: bool) -> list[int]:
        """Copies the held gradients to shared memory; returns the tensors to push now.

        Collective if sparse gradients exist and are averaged: workers exchange their numbers of rows.
        """
        if not self._indices:
            return []
        if are_averaged:
            counts = np.array(
                [self._held[index]._nnz() if index in self._held else 0 for index in self._indices],
                dtype=np.int64,
            )
            self._session.all_reduce(counts)
            for index, most_rows in zip(self._indices, counts.tolist(), strict=True):
                self._row_memory.expect(index, most_rows)
        held, self._held = self._held, {}
        for index, gradient in held.items():
            _write(self._row_memory.give(index, gradient._nnz()), gradient)
            self._count_bytes(index, gradient._nnz())
        return list(held)

    def deliver(self, contributors: Sequence[int]) -> None:
        """Sets `.grad` to the mean, of each parameter that any worker used."""
        for index in self._indices:
            if contributors[index]:
                self._parameters[index][1].grad = self.mean(index)

    def mean(self, index: int) -> torch.Tensor:
        """The averaged gradient, sparse and coalesced."""
        rows = self._row_memory.mean(index)
        parameter = self._parameters[index][1]
        numbers = (
            torch.frombuffer(rows.numbers, dtype=torch.int64)
            if rows.count
            else torch.empty(0, dtype=torch.int64, device="cpu")
        )
        values = _values(rows, parameter)
        mean = torch.sparse_coo_tensor(
            numbers[None],
            values,
            parameter.shape,
            device=values.device,
            is_coalesced=True,
            check_invariants=False,
        )
        return mean if self._gradient_as_view else mean.clone()

    def replace_mean(self, index: int, gradient: torch.Tensor) -> None:
        """Replaces the mean by `gradient` before an update; costs nothing if they are the same tensor."""
        mean = self._row_memory.mean(index)
        if (
            gradient.is_sparse
            and gradient.is_coalesced()
            and gradient._nnz() == mean.count
            and mean.count
            and gradient._values().data_ptr() == _values(mean, gradient).data_ptr()
        ):
            return
        rows = self._rows_of(index, gradient)
        _write(self._row_memory.replace_mean(index, rows._nnz()), rows)

    def _count_bytes(self, index: int, num_rows: int) -> None:
        """Counts pushed rows with their numbers; native code counts all other tensors."""
        spec, settings = self._group.specs[index], self._session.settings
        is_small = settings.sync_algorithm == "auto" and spec.nbytes <= settings.gather_bytes
        self._session.metrics_writer.add(
            "coarse_pushed_bytes_total",
            num_rows * (NUMBER_BYTES + spec.row_elements * ITEM_BYTES[spec.dtype]),
            label="gather" if is_small or settings.sync_algorithm == "gather" else "direct",
            device=self._table_group.routing.route(self._shard_bytes[index]),
        )

    @property
    def _table_group(self) -> TensorGroup:
        assert isinstance(self._group, TensorGroup)
        return self._group

    @property
    def _row_memory(self) -> RowMemory:
        return self._table_group.rows

    def _rows_of(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        name, parameter = self._parameters[index]
        if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
            raise ValueError(
                f"parameter {name!r} belongs to a layer with sparse=True, but its gradient is not sparse. If "
                "other layers use it too, build all of them with sparse=False."
            )
        if gradient.dtype != parameter.dtype or gradient.shape != parameter.shape:
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype} {list(parameter.shape)}, but its gradient is "
                f"{gradient.dtype} {list(gradient.shape)}. Convert the model before wrapping it."
            )
        return gradient.detach().coalesce()


def _sizes_of_shards(group: TensorGroup) -> dict[int, int]:
    """Bytes of one shard of each tensor; all shards of a tensor are about equal."""
    return dict(zip(group.tensors_of_shards(), group.shard_sizes(), strict=True))


def find_sparse_parameters(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Parameters whose layers produce sparse gradients."""
    return {
        layer.weight
        for layer in module.modules()
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
    }


def find_renormalised(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Parameters to which forward writes, because it renormalises looked-up rows longer than max_norm."""
    return {
        layer.weight
        for layer in module.modules()
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.max_norm is not None
    }


def check_sparse_parameters(
    session: Session, parameters: Iterable[tuple[str, torch.nn.Parameter]], sparse: set[torch.nn.Parameter]
) -> None:
    """Rejects parameters whose rows cannot be transferred.

    Raises:
        ValueError: Names the parameter, the reason and the alternative.
    """
    for name, parameter in parameters:
        if parameter not in sparse:
            continue
        reason = session.cannot_reduce_rows()
        if not parameter.is_cpu or not parameter.is_contiguous():
            reason = f"it has strides {parameter.stride()} on {parameter.device}, but must be contiguous on the CPU"
        if reason:
            raise ValueError(
                f"parameter {name!r}: sparse gradients cannot be averaged here: {reason}. Build the layer with "
                "sparse=False, or list the parameter in module._ddp_params_and_buffers_to_ignore and average it "
                "yourself."
            )


def _values(rows: Rows, like: torch.Tensor) -> torch.Tensor:
    if not rows.count:
        return torch.empty(0, like.shape[1], dtype=like.dtype, device="cpu")
    return torch.frombuffer(rows.values, dtype=like.dtype).view(rows.count, like.shape[1])


def _write(rows: Rows, gradient: torch.Tensor) -> None:
    if rows.count:
        torch.frombuffer(rows.numbers, dtype=torch.int64).copy_(gradient._indices()[0])
        _values(rows, gradient).copy_(gradient._values())

"""Tensors as the native collectives take them: memory, types and operators; what native/tensors.hpp is in C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from coarse.kernels._native import Combine, ElementType
from coarse.torch.gradients.stream_order import StreamOrder

ELEMENTS = {
    torch.float32: ElementType.FLOAT32,
    torch.float64: ElementType.FLOAT64,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.float16: ElementType.FLOAT16,
    torch.int8: ElementType.INT8,
    torch.uint8: ElementType.UINT8,
    torch.int16: ElementType.INT16,
    torch.int32: ElementType.INT32,
    torch.int64: ElementType.INT64,
    torch.bool: ElementType.BOOL,
}


class Memory:
    """Plain memory for tensors that are read, written or both; what was written is stored by finish()."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._stores: list[tuple[torch.Tensor, torch.Tensor, StreamOrder]] = []

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = checked(tensor).detach().resolve_conj().resolve_neg().cpu().contiguous()
        self._kept.append(plain)
        return plain

    def write(self, tensor: torch.Tensor, *, is_read: bool = False) -> torch.Tensor:
        user = checked(tensor).detach()
        if user.device.type == "cpu" and user.is_contiguous() and not (user.is_conj() or user.is_neg()):
            plain = user
        else:
            plain = (
                self.read(user).clone()
                if is_read
                else torch.empty(user.shape, dtype=user.dtype, device="cpu")
            )
            self._stores.append((user, plain, StreamOrder([user])))
        self._kept.append(plain)
        return plain

    def finish(self) -> None:
        for user, plain, order in self._stores:
            with order.followed():
                user.copy_(plain)


def checked(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"coarse: serves tensors on cpu and cuda, not {tensor.device}")
    if tensor.layout != torch.strided:
        raise ValueError(f"coarse: the backend in Python takes dense tensors, not {tensor.layout}")
    return tensor


def split(tensor: torch.Tensor, sizes: Sequence[int], num_ranks: int) -> list[torch.Tensor]:
    if not sizes:
        if tensor.shape[0] % num_ranks:
            raise ValueError(f"coarse: {tensor.shape[0]} rows are not divisible by {num_ranks} ranks")
        sizes = [tensor.shape[0] // num_ranks] * num_ranks
    return list(tensor.split(list(sizes)))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def combine_of(op: Any) -> Combine:
    # Compared, not looked up: what comes here is a ReduceOp, which is equal to its RedOpType and hashes otherwise.
    known = (
        (dist.ReduceOp.SUM, Combine.SUM),
        (dist.ReduceOp.AVG, Combine.MEAN),
        (dist.ReduceOp.MAX, Combine.MAX),
        (dist.ReduceOp.MIN, Combine.MIN),
        (dist.ReduceOp.PRODUCT, Combine.PRODUCT),
        (dist.ReduceOp.BAND, Combine.BIT_AND),
        (dist.ReduceOp.BOR, Combine.BIT_OR),
        (dist.ReduceOp.BXOR, Combine.BIT_XOR),
    )
    for candidate, combine in known:
        if op == candidate:
            return combine
    raise ValueError(f"coarse: reduce op {op} is not supported")

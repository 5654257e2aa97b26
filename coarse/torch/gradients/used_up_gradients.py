"""Placeholders in `.grad` between an overlapped backward and its step(); memory devices have used up the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class UsedUpGradient(torch.Tensor):  # type: ignore[misc]
    """A gradient without values: clipping, scaling or reading it raises an error.

    With `None` instead, torch.nn.utils.clip_grad_norm_() would silently clip nothing. Shape, dtype and device are
    available.

    Args:
        parameter: The gradient's parameter.
    """

    _ANSWERED = frozenset(
        {"shape", "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "grad", "ndim"}
    )
    _MOVES = frozenset(
        {
            "to",
            "cpu",
            "cuda",
            "float",
            "double",
            "half",
            "bfloat16",
            "type",
            "requires_grad_",
            "share_memory_",
        }
    )
    """Moves of a module, which also move its gradients; cleaning up after an exception may move a module."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> UsedUpGradient:
        made: UsedUpGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ("size", "dim", "numel", "is_floating_point") or (
            name == "__get__" and (attribute in cls._ANSWERED or attribute.startswith("is_"))
        ):
            return super().__torch_function__(func, types, args, kwargs or {})
        if name in cls._MOVES or (name == "__set__" and attribute == "data" and args[0] is args[1]):
            return args[0]
        if name == "_has_compatible_shallow_copy_type":
            return True
        raise _too_late()

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise _too_late()

    def __repr__(self, *_: Any, **__: Any) -> str:
        return "<gradient that an overlapped update has used up>"

    def __deepcopy__(self, _: Any) -> None:
        return None  # a copy of a parameter has no gradient yet

    def __reduce_ex__(self, _: Any) -> Any:
        raise _too_late()


def _too_late() -> RuntimeError:
    return RuntimeError(
        "with overlap=True, memory devices update each parameter during backward(), so between backward() and "
        "step() no gradient exists to clip, scale, add to or read. To clip by the norm, create "
        "DistributedOptimizer(..., max_grad_norm=) with overlap=False, which clips within the update; for "
        "clip_grad_value_() and other uses of gradients, pass overlap=False. Call step() after each backward()"
    )

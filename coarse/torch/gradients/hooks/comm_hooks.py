"""torch's communication hooks that have a counterpart in COARSE: those that choose the transfer type of gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

_DTYPES: list[tuple[Any, torch.dtype | None]] = [
    (default_hooks.allreduce_hook, None),
    (dist.BuiltinCommHookType.ALLREDUCE, None),
    (default_hooks.fp16_compress_hook, torch.float16),
    (dist.BuiltinCommHookType.FP16_COMPRESS, torch.float16),
    (default_hooks.bf16_compress_hook, torch.bfloat16),
]


def rounds_only(hook: Any) -> bool:
    """Whether a hook, or a dist.BuiltinCommHookType, has a counterpart: travel_dtype()."""
    return any(_is_same(hook, each) for each, _ in _DTYPES)


def travel_dtype(hook: Any) -> torch.dtype | None:
    """The transfer type of gradients under a hook or a dist.BuiltinCommHookType; None to keep their type.

    Raises:
        NotImplementedError: If the hook does something else; suggests an alternative.
    """
    for each, dtype in _DTYPES:
        if _is_same(hook, each):
            return dtype
    raise NotImplementedError(
        f"coarse.torch.DistributedDataParallel does not support the built-in communication hook {hook!r}; it "
        "supports dist.BuiltinCommHookType.ALLREDUCE and FP16_COMPRESS and, by register_comm_hook(), torch's "
        "allreduce_hook, fp16_compress_hook and bf16_compress_hook, and your own hooks"
    )


def _is_same(hook: Any, known: Any) -> bool:
    return hook is known or (isinstance(hook, dist.BuiltinCommHookType) and hook == known)

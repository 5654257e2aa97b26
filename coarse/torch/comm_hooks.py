"""Which of torch's communication hooks have a counterpart here: those that say in what type gradients travel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def travel_dtype(hook: Any) -> torch.dtype | None:
    """The type in which gradients travel under a hook, or a dist.BuiltinCommHookType; None for their own.

    Raises:
        NotImplementedError: If it does something else; says what to do instead.
    """
    known: list[tuple[Any, torch.dtype | None]] = [
        (default_hooks.allreduce_hook, None),
        (dist.BuiltinCommHookType.ALLREDUCE, None),
        (default_hooks.fp16_compress_hook, torch.float16),
        (dist.BuiltinCommHookType.FP16_COMPRESS, torch.float16),
        (default_hooks.bf16_compress_hook, torch.bfloat16),
    ]
    for each, dtype in known:
        if each is hook or (isinstance(hook, dist.BuiltinCommHookType) and each == hook):
            return dtype
    raise NotImplementedError(
        f"coarse.torch.DistributedDataParallel does not support the communication hook {_name(hook)}, which works on "
        "torch's buckets; of torch's own it takes allreduce_hook, fp16_compress_hook and bf16_compress_hook. Change "
        "local gradients before they are averaged with parameter.register_hook(), averaged ones between backward "
        "and step."
    )


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or repr(hook)

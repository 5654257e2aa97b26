"""Features of torch's DistributedDataParallel that COARSE's refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch


class UnsupportedFeatures(torch.nn.parallel.DistributedDataParallel):  # type: ignore[misc]
    """Raises in each method that would need torch's buckets; every message suggests an alternative."""

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "a shallow copy of a DistributedDataParallel would average the gradients of the same parameters; use "
            "copy.deepcopy(model), or wrap model.module again"
        )

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], *_: Any, **__: Any
    ) -> NoReturn:
        _refuse(
            "buffer hooks",
            "Pass forward_sync_buffers=False and reduce model.module.buffers() after forward with "
            "torch.distributed",
        )

    def _register_fused_optim(self, optim: type, *_: Any, **__: Any) -> NoReturn:
        _refuse("optimizers that run inside backward", "Call optimizer.step() after backward")

    def _update_process_group(self, new_process_group: Any) -> NoReturn:
        _refuse("changing the process group", "Wrap model.module again with the new process group")

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Does nothing: rows are transferred with their numbers."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Does nothing: outputs are neither cloned nor wrapped."""


def _refuse(what: str, alternative: str) -> NoReturn:
    raise NotImplementedError(f"coarse.torch.DistributedDataParallel does not support {what}. {alternative}.")

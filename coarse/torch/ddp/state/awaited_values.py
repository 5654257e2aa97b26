"""Modules that a worker built on the meta device: their values come from worker 0 when the model is registered."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.utils.hooks import RemovableHandle

from coarse.torch.ddp.module_hooks import OwnHook


class AwaitedValues:
    """Moves a module's meta-device tensors to host memory whose pages are not allocated yet.

    The tensors remain the same objects, so that an existing optimizer keeps them. Until release(), running the module
    and reading its state dict raise an error, because all values would be zero.

    Args:
        module: Module with possible tensors on the meta device; None to do nothing.
        ignored: Names of parameters and buffers to ignore.

    Raises:
        ValueError: If something else, such as a hook, refers to a parameter's internals.
    """

    def __init__(self, module: torch.nn.Module | None, ignored: Collection[str]) -> None:
        self._handles: list[RemovableHandle] = []
        if module is None:
            return
        self._names = [
            name
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
            if tensor.is_meta and name not in ignored
        ]
        if not self._names:
            return
        for name, parameter in module.named_parameters():
            if parameter.is_meta and name not in ignored:
                _give_memory(name, parameter)
        _give_buffers_memory(module, ignored)
        refuse = OwnHook(self.check)
        self._handles = [
            module.register_forward_pre_hook(refuse),
            module.register_state_dict_pre_hook(refuse),
        ]

    def release(self) -> None:
        """Marks the values as received. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def are_missing(self) -> bool:
        """Whether the module still has no values."""
        return bool(self._handles)

    def check(self) -> None:
        """Raises RuntimeError if the module still has no values."""
        if not self.are_missing:
            return
        raise RuntimeError(
            f"{len(self._names)} tensors of this model were built on the meta device ({self._names[0]!r}, ...), and "
            "have no values yet. To get them, create the DistributedOptimizer, or call the wrapper's forward with "
            "gradients on all workers"
        )


def _give_memory(name: str, parameter: torch.nn.Parameter) -> None:
    try:
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(_in_host(parameter), parameter.requires_grad))
    except RuntimeError as error:
        raise ValueError(
            f"parameter {name!r} is on the meta device, and its memory cannot be allocated: {error}. Wrap the "
            "model before you register hooks on its parameters"
        ) from error


def _give_buffers_memory(module: torch.nn.Module, ignored: Collection[str]) -> None:
    for prefix, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            path = f"{prefix}.{name}" if prefix else name
            if buffer is not None and buffer.is_meta and path not in ignored:
                layer._buffers[name] = _in_host(buffer)


def _in_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

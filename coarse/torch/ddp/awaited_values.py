"""Modules that a worker built on the meta device: their values come from worker 0 when the model is registered."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.utils.hooks import RemovableHandle

from coarse.torch.ddp.module_hooks import OwnHook


class AwaitedValues:
    """Gives a module that has tensors on the meta device memory of the host, of which no page is taken yet.

    The tensors stay the same objects, so that an optimizer which has them already keeps them. Until release() the
    module neither runs nor gives a state dict: it would be of zeros.

    Args:
        module: Of which tensors may be on the meta device; None for one that is left alone.
        ignored: Names of parameters and buffers to leave alone.

    Raises:
        ValueError: If something else refers to a parameter's innards, as hooks do.
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
        """The values have come. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def are_missing(self) -> bool:
        """Whether the module is without values still."""
        return bool(self._handles)

    def check(self) -> None:
        """Raises RuntimeError if the module is without values still."""
        if not self.are_missing:
            return
        raise RuntimeError(
            f"{len(self._names)} tensors of this model were built on the meta device ({self._names[0]!r}, ...), and "
            "their values have not come yet: DistributedOptimizer brings them, or the first forward of the wrapper "
            "with gradients, which all workers call"
        )


def _give_memory(name: str, parameter: torch.nn.Parameter) -> None:
    try:
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(_in_host(parameter), parameter.requires_grad))
    except RuntimeError as error:
        raise ValueError(
            f"parameter {name!r} is on the meta device and cannot be given memory: {error}. Wrap the model before "
            "hooks are registered on its parameters"
        ) from error


def _give_buffers_memory(module: torch.nn.Module, ignored: Collection[str]) -> None:
    for prefix, layer in module.named_modules():
        for name, buffer in layer._buffers.items():
            path = f"{prefix}.{name}" if prefix else name
            if buffer is not None and buffer.is_meta and path not in ignored:
                layer._buffers[name] = _in_host(buffer)


def _in_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

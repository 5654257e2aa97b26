"""Makes PyTorch's own tests use the CPU as four GPUs, so that the DDP tests run without a GPU.

Tensors for a GPU are created on the CPU; streams and synchronisation do nothing. Tests of a GPU's own behaviour then
fail under any DDP; running all tests under torch's DDP identifies them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NUM_GPUS = 4
_CPU = torch.device("cpu")
_Device = torch.device


def take_processor_for_gpus() -> None:
    """From now on, in this process. Before distributed_test.py is imported, which looks for GPUs then."""
    gpus = torch.cuda
    gpus.is_available = lambda: True
    gpus.device_count = lambda: _NUM_GPUS
    gpus.current_device = lambda: 0
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all"):
        setattr(gpus, name, lambda *_, **__: None)  # one for each: torch.compile tells functions apart
    gpus.Stream = _Stream  # type: ignore[misc]
    gpus.current_stream = lambda *_, **__: _Stream()
    gpus.stream = lambda *_: contextlib.nullcontext()
    move = torch.nn.Module.to

    def move_to_processor(module: torch.nn.Module, *places: Any, **options: Any) -> torch.nn.Module:
        options = {name: _on_processor(value) for name, value in options.items()}
        return move(module, *map(_on_processor, places), **options)

    torch.nn.Module.to = move_to_processor  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = lambda module, *_, **__: module  # type: ignore[method-assign,assignment,misc]
    torch.device = _ProcessorDevice  # type: ignore[misc,assignment]


def wrap_with(kind: type[torch.nn.Module]) -> None:
    """Has tests wrap models in `kind`, a DistributedDataParallel, without naming devices."""

    class DistributedDataParallel(kind):  # type: ignore[misc,valid-type]
        def __init__(
            self, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any
        ) -> None:
            super().__init__(module, None, None, **options)

    DistributedDataParallel.__qualname__ = DistributedDataParallel.__name__
    globals()[DistributedDataParallel.__name__] = DistributedDataParallel  # where pickle looks for it
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]


class OnProcessor(TorchFunctionMode):
    """While this is entered, tensors are made on the processor, and stay there."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        options = dict(options or {})
        if function is torch.Tensor.cuda:
            return arguments[0]
        if function is torch.Tensor.to:
            arguments = (arguments[0], *map(_on_processor, arguments[1:]))
        if "device" in options:
            options["device"] = _on_processor(options["device"])
        return function(*arguments, **options)


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.wait_stream = self.wait_event = self.synchronize = lambda *_: None


class _MakesProcessor(type):
    def __call__(cls, *arguments: Any, **options: Any) -> torch.device:
        is_ordinal = bool(arguments) and isinstance(arguments[0], int)
        return _CPU if is_ordinal else _on_processor(_Device(*arguments, **options))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Device)


class _ProcessorDevice(metaclass=_MakesProcessor):
    """Stands for torch.device."""


def _on_processor(place: Any) -> Any:
    """`place` where it is no GPU, by ordinal, name or device."""
    if isinstance(place, bool):
        return place
    is_gpu = isinstance(place, int) or (isinstance(place, str) and place.startswith("cuda"))
    return _CPU if is_gpu or (isinstance(place, _Device) and place.type == "cuda") else place

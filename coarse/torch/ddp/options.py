"""Checks the arguments of DistributedDataParallel and whether it supports the module."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import _get_device_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of the module and of its inputs.

    Args:
        first: Device of the module's first parameter.
        device_ids: The one accelerator of the module if the user named it, otherwise None.
        output_device: Index of that accelerator, or None.
    """

    first: torch.device
    device_ids: list[int] | None
    output_device: int | None


def find_devices(
    parameters: Sequence[torch.nn.Parameter], device_ids: Sequence[Any] | None, output_device: Any
) -> Devices:
    """Applies torch DDP's rules for `device_ids` and `output_device`.

    Raises:
        ValueError: If they do not match the devices of `parameters`, or the devices have several types.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can be None or name one device, not {list(device_ids)}")
    devices = {parameter.device for parameter in parameters}
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(f"all parameters must be on devices of one type, but are on {sorted(types)}")
    first = parameters[0].device
    if device_ids and first.type != "cpu" and len(devices) == 1:
        index = _get_device_index(device_ids[0], True)
        output = index if output_device is None else _get_device_index(output_device, True)
        return Devices(first=first, device_ids=[index], output_device=output)
    if device_ids or output_device is not None:
        raise ValueError(
            f"device_ids={device_ids} and output_device={output_device} only fit a module on a single "
            f"accelerator; this one is on {', '.join(sorted(map(str, devices)))}. Leave both at None."
        )
    return Devices(first=first, device_ids=None, output_device=None)


def check_module(module: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Refuses modules whose gradients cannot be averaged.

    Raises:
        RuntimeError: For uninitialised (lazy) parameters, or if no parameter is trainable.
        ValueError: For SyncBatchNorm on the CPU, distributed tensors, parameters without memory, and modules that are
            already wrapped.
    """
    averaged = set(parameters)
    for layer in module.modules():
        wrapped = isinstance(layer, torch.nn.parallel.DistributedDataParallel)
        if wrapped and not averaged.isdisjoint(layer.parameters()):
            raise ValueError(
                f"the module has parts that {type(layer).__module__}.{type(layer).__name__} already wraps: their "
                "gradients would be averaged twice. Wrap the bare module once"
            )
    if any(parameter.is_meta for parameter in parameters):
        raise ValueError(
            "the module has parameters on the meta device, which have no values; allocate them first (to_empty() "
            "and an initialisation), then wrap it. For a model in host memory, only worker 0 must do so; the "
            "wrapper fills the others"
        )
    if any(isinstance(parameter, torch.nn.parameter.UninitializedParameter) for parameter in parameters):
        raise RuntimeError(
            "the module has uninitialized parameters; run one forward with an example input before "
            "wrapping it"
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed: no parameter of the module requires a gradient"
        )
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "placements"):
            raise ValueError(
                f"parameter {name!r} is a distributed tensor; COARSE averages plain ones. "
                "Pass the module before it is parallelised, or list it in _ddp_params_and_buffers_to_ignore."
            )
    if any(parameter.device.type == "cpu" for parameter in parameters) and any(
        isinstance(layer, torch.nn.SyncBatchNorm) for layer in module.modules()
    ):
        raise ValueError("SyncBatchNorm layers only work on accelerators; use BatchNorm on the CPU")


def check_unsupported(
    *, mixed_precision: Any, delayed: Any, delay_trigger: Any, parameters: Sequence[torch.nn.Parameter]
) -> None:
    """Refuses arguments that COARSE does not implement.

    Raises:
        ValueError: Names the argument and the alternative.
    """
    if mixed_precision is not None:
        raise ValueError(
            "mixed_precision is not supported; use torch.autocast around forward, or convert the module "
            "(module.to(torch.bfloat16)) before wrapping it"
        )
    if (delayed is None) != (delay_trigger is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce must be given together")
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
        raise ValueError(
            "the module has optimizers that run inside backward (apply_optimizer_in_backward); they would "
            "see gradients before they are averaged. Call optimizer.step() after backward instead."
        )


def trainable_parameters(
    module: torch.nn.Module, ignored: Collection[str]
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters that require a gradient, in module order; tied ones once, without ignored and empty ones."""
    seen: set[torch.nn.Parameter] = set()
    for module_name, layer in module.named_modules():
        for parameter_name, parameter in layer.named_parameters(recurse=False):
            name = f"{module_name}.{parameter_name}" if module_name else parameter_name
            if name in ignored or not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            if parameter.numel():
                yield name, parameter

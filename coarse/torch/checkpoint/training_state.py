"""A model and its optimizer as the named tensors of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coarse.checkpoint.reader import Checkpoint, Mismatch, Progress
from coarse.checkpoint.source import MODEL_PREFIX, OPTIMIZER_PREFIX, SavedTensor
from coarse.checkpoint.values import SmallTensor, from_json, to_json
from coarse.errors import CheckpointError
from coarse.torch.ddp.distributed import DistributedDataParallel
from coarse.torch.gradients.layout import as_bytes
from coarse.torch.gradients.sparse_gradients import find_renormalised
from coarse.torch.optimizer.distributed_optimizer import DistributedOptimizer

DTYPE_OF: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""torch's dtypes by safetensors' names."""

_NAME_OF = {dtype: name for name, dtype in DTYPE_OF.items()}
# States of torch's optimizers that have their parameter's shape.
_STATES_LIKE_PARAMETERS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "exp_inf", "master"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The contents of a checkpoint for a model and its optimizer; the tensors are the originals, not copies.

    Args:
        tensors: By their names in the checkpoint.
        only_optimizer_changes: Names of the tensors that only the optimizer's update changes.
        optimizer: The optimizer's settings as JSON; None without an optimizer.
    """

    tensors: Mapping[str, torch.Tensor]
    only_optimizer_changes: frozenset[str]
    optimizer: Any


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside its distributed wrapper."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    return model.module if isinstance(model, wrappers) else model


def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> TrainingState:
    """Names all tensors and settings of model and optimizer.

    Raises:
        CheckpointError: If the optimizer holds parameters of another model, or a value that is not plain.
    """
    tensors = model_tensors(model)
    if optimizer is None:
        return TrainingState(tensors=tensors, only_optimizer_changes=frozenset(), optimizer=None)
    saved = optimizer.state_dict()
    named = dict(bare(model).named_parameters())
    names = _names_of_parameters(named, optimizer)
    written_by_forward = find_renormalised(bare(model))
    frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
    steady = {f"{MODEL_PREFIX}{name}" for name in (*names, *frozen) if named[name] not in written_by_forward}
    values: dict[str, dict[str, Any]] = {}
    for number, entries in saved["state"].items():
        for state, value in entries.items():
            if not isinstance(state, str):
                raise CheckpointError(
                    f"the optimizer's state of {names[number]} has an entry {state!r}, whose name is not a string"
                )
            if isinstance(value, torch.Tensor):
                name = f"{OPTIMIZER_PREFIX}{state}.{names[number]}"
                tensors[name] = value
                steady.add(name)
            else:
                values.setdefault(names[number], {})[state] = value
    return TrainingState(
        tensors=tensors,
        only_optimizer_changes=frozenset(steady & tensors.keys()),
        optimizer=_settings(optimizer, saved["param_groups"], names, values, _beside(saved)),
    )


def optimizer_settings(optimizer: DistributedOptimizer, names: Sequence[str]) -> Any:
    """The settings of an optimizer whose state is in the memory devices, in the form of training_state().

    Args:
        optimizer: The optimizer.
        names: Names of its parameters, in the order of its groups: names_of_parameters().
    """
    numbers = iter(range(len(names)))
    numbered = [
        {**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups
    ]
    return _settings(optimizer, numbered, names, {}, {})


def names_of_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters, in the order in which its state dict numbers them.

    Raises:
        CheckpointError: If some parameters are not the model's.
    """
    return _names_of_parameters(dict(bare(model).named_parameters()), optimizer)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by their names in a checkpoint.

    Raises:
        CheckpointError: If the state dict holds other values.
    """
    found: dict[str, torch.Tensor] = {}
    for key, value in bare(model).state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{key!r} of the model's state dict is a {type(value).__name__}, not a tensor; pass it as a "
                "worker's state, or make it a buffer"
            )
        found[f"{MODEL_PREFIX}{key}"] = value
    return found


def described(name: str, tensor: torch.Tensor) -> SavedTensor:
    """A checkpoint's description of a tensor.

    Raises:
        CheckpointError: If its dtype or layout cannot be saved.
    """
    if tensor.dtype not in _NAME_OF or tensor.layout is not torch.strided:
        raise CheckpointError(
            f"{name} is {tensor.dtype}, {tensor.layout}, which safetensors files cannot hold"
        )
    return SavedTensor(name=name, dtype=_NAME_OF[tensor.dtype], shape=tuple(tensor.shape))


def load_training_state(
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Loads a checkpoint into model and optimizer; changes nothing unless everything fits.

    Without an optimizer, an optimizer's state in the checkpoint is ignored. Parameters that memory devices hold are
    loaded into the memory that all workers share: every worker must do so at the same time.

    Raises:
        CheckpointError: If tensors or settings are missing, unexpected or of another shape; lists all of them.
        OSError: If the disk cannot read it.
    """
    remote = optimizer.remote_parameters if isinstance(optimizer, DistributedOptimizer) else None
    tensors = model_tensors(model)
    destinations = tensors if remote is None else remote.in_shared_memory(tensors)
    wanted = {described(name, tensor): tensor for name, tensor in destinations.items()}
    parameters = dict(bare(model).named_parameters())
    states = {
        tensor: _empty_state(tensor, parameters)
        for tensor in checkpoint.tensors
        if tensor.name.startswith(OPTIMIZER_PREFIX)
    }
    _check_model(checkpoint, wanted)
    if optimizer is None:
        states = {}
    else:
        state_dict = _optimizer_state_dict(checkpoint, model, optimizer, states)
    _keep_snapshots(model, optimizer)
    load_tensors(checkpoint, {**wanted, **states}, progress)
    if remote is not None:
        remote.see_shared()
    _tell_loaded(model, tensors)
    if optimizer is not None:
        optimizer.load_state_dict(state_dict)


def _keep_snapshots(*holders: Any) -> None:
    """Makes unfinished snapshots copy memory-device contents before they are overwritten."""
    for holder in holders:
        if isinstance(holder, (DistributedDataParallel, DistributedOptimizer)):
            holder.keep_snapshots()


def _tell_loaded(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Loads the model's own tensors, which were filled in place, so that the model's load hooks run."""
    module = bare(model)
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    loaded = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}
    # torch copies no tensor onto itself.
    module.load_state_dict(
        {
            name: own[name] if name in own and own[name].is_set_to(tensor) else tensor
            for name, tensor in loaded.items()
        }
    )


def _empty_state(tensor: SavedTensor, parameters: Mapping[str, torch.nn.Parameter]) -> torch.Tensor:
    """Host memory for an optimizer state, in its parameter's memory order if the shapes are equal."""
    parameter = parameters.get(tensor.name.removeprefix(OPTIMIZER_PREFIX).partition(".")[2])
    if parameter is None or tuple(parameter.shape) != tensor.shape:
        return empty_tensor(tensor)
    return torch.empty_like(parameter, dtype=DTYPE_OF[tensor.dtype], device="cpu", requires_grad=False)


def as_small_tensor(value: Any) -> Any:
    """A torch tensor as a plain value of a checkpoint; other values are unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    tensor = described("a tensor among settings", value)
    data = as_bytes(value.detach().cpu().contiguous()).numpy().tobytes()
    return SmallTensor(dtype=tensor.dtype, shape=tensor.shape, data=data)


def from_small_tensor(value: SmallTensor) -> torch.Tensor:
    """The torch tensor of a plain value, in host memory."""
    if not value.data:
        return torch.empty(value.shape, dtype=DTYPE_OF[value.dtype], device="cpu")
    flat = torch.frombuffer(bytearray(value.data), dtype=DTYPE_OF[value.dtype])
    return flat.reshape(value.shape)


def _beside(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a state dict that torch's own optimizers do not have."""
    return {name: value for name, value in state_dict.items() if name not in ("state", "param_groups")}


def _settings(
    optimizer: torch.optim.Optimizer,
    numbered: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    values: Mapping[str, Mapping[str, Any]],
    beside: Mapping[str, Any],
) -> Any:
    """An optimizer's settings as JSON.

    Args:
        optimizer: The optimizer.
        numbered: Its groups, with parameters by number.
        names: Names of the parameters, by number.
        values: Entries of its state that are not tensors.
        beside: Entries of its state dict in addition to state and groups.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in numbered]
    settings = {"class": _kind(optimizer), "param_groups": groups, "values": values}
    if beside:
        settings["beside"] = beside
    encoded = to_json(settings, translate=as_small_tensor, path="optimizer")
    for group, source in zip(encoded["param_groups"], numbered, strict=True):
        group["params"] = [names[number] for number in source["params"]]
    return encoded


def _names_of_parameters(
    named: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[str]:
    """Names of the optimizer's parameters, in the order in which its state dict numbers them."""
    names = {parameter: name for name, parameter in named.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(parameter not in names for parameter in parameters)
    if foreign:
        raise CheckpointError(
            f"the optimizer has {foreign} parameter(s) that are not in the model; save the model that it updates"
        )
    return [names[parameter] for parameter in parameters]


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Name of the optimizer's class, also if it runs in the memory devices."""
    return type(optimizer.wrapped if isinstance(optimizer, DistributedOptimizer) else optimizer).__name__


def _check_model(checkpoint: Checkpoint, wanted: Iterable[SavedTensor]) -> None:
    found = [tensor for tensor in checkpoint.tensors if not tensor.name.startswith(OPTIMIZER_PREFIX)]
    mismatch = Mismatch.between(wanted, found)
    if mismatch:
        raise CheckpointError(f"{checkpoint.path} does not fit the model; {mismatch}")


def _optimizer_state_dict(
    checkpoint: Checkpoint,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    states: Mapping[SavedTensor, torch.Tensor],
) -> dict[str, Any]:
    """The checkpoint's state dict, with the parameter numbers of `optimizer`.

    Raises:
        CheckpointError: If the checkpoint's optimizer has another class, grouping or set of parameters.
    """
    if checkpoint.manifest.optimizer is None:
        raise CheckpointError(f"{checkpoint.path} contains no optimizer; restore only the model")
    settings = from_json(checkpoint.manifest.optimizer, translate=from_small_tensor)
    named = dict(bare(model).named_parameters())
    names = _names_of_parameters(named, optimizer)
    numbers = {name: number for number, name in enumerate(names)}
    shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    groups = _groups(checkpoint, settings, optimizer, names)
    state: dict[int, dict[str, Any]] = {}
    wrong: list[str] = []
    for tensor, memory in states.items():
        name, _, parameter = tensor.name.removeprefix(OPTIMIZER_PREFIX).partition(".")
        if parameter not in numbers:
            wrong.append(f"{tensor.name} belongs to none of the optimizer's parameters")
        elif name in _STATES_LIKE_PARAMETERS and tensor.shape != shapes[parameter]:
            wrong.append(
                f"{tensor.name} is {list(tensor.shape)}, but its parameter is {list(shapes[parameter])}"
            )
        else:
            state.setdefault(numbers[parameter], {})[name] = memory
    if wrong:
        raise CheckpointError(f"{checkpoint.path} does not fit the optimizer; {'; '.join(wrong[:20])}")
    for parameter, values in settings["values"].items():
        state.setdefault(numbers[parameter], {}).update(values)
    return {**settings.get("beside", {}), "state": state, "param_groups": groups}


def _groups(
    checkpoint: Checkpoint, settings: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: list[str]
) -> list[dict[str, Any]]:
    saved = settings["param_groups"]
    if settings["class"] != _kind(optimizer):
        raise CheckpointError(
            f"{checkpoint.path} was saved from the optimizer {settings['class']}, but this one is {_kind(optimizer)}"
        )
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{checkpoint.path} has {len(saved)} parameter groups, but the optimizer has "
            f"{len(optimizer.param_groups)}"
        )
    numbered = iter(range(len(names)))
    groups = []
    for index, (group, mine) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        members = [next(numbered) for _ in mine["params"]]
        if {names[number] for number in members} != set(group["params"]):
            difference = sorted({names[number] for number in members} ^ set(group["params"]))
            raise CheckpointError(
                f"{checkpoint.path}: parameter group {index} has other members than the optimizer's: "
                f"{', '.join(difference[:20])}"
            )
        groups.append({**group, "params": members})
    return groups


def load_tensors(
    checkpoint: Checkpoint, destinations: Mapping[SavedTensor, torch.Tensor], progress: Progress
) -> None:
    """Fills tensors in place.

    Only tensors that are not contiguous in host memory need an intermediate copy.
    """
    staged = {
        tensor: memory if memory.is_cpu and memory.is_contiguous() else empty_tensor(tensor)
        for tensor, memory in destinations.items()
    }
    checkpoint.load({tensor: _memory_of(memory) for tensor, memory in staged.items()}, progress)
    with torch.no_grad():
        for tensor, memory in destinations.items():
            if staged[tensor] is not memory:
                _once(memory, memory).copy_(_once(staged[tensor], memory))
            else:
                torch.autograd.graph.increment_version(memory)


def _once(tensor: torch.Tensor, repeats: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` that have separate memory in `repeats`, which may be an expanded tensor."""
    for dimension, stride in enumerate(repeats.stride()):
        if stride == 0 and repeats.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def empty_tensor(tensor: SavedTensor) -> torch.Tensor:
    """Host memory for a tensor."""
    return torch.empty(tensor.shape, dtype=DTYPE_OF[tensor.dtype], device="cpu")


def _memory_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(as_bytes(tensor).numpy()) if tensor.numel() else memoryview(bytearray())

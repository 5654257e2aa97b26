"""Checkpoints of an optimizer in the memory devices: the home device writes a snapshot to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.source import MODEL_PREFIX, OPTIMIZER_PREFIX, SavedTensor
from coarse.checkpoint.writer import Progress, SaveDetails, WriteOptions
from coarse.client.memory.snapshots import Snapshot, SnapshotWrite
from coarse.torch.checkpoint.training_state import bare, described, model_tensors
from coarse.torch.gradients.layout import as_bytes
from coarse.torch.optimizer.remote_parameters import RemoteParameters
from coarse.wire.messages import Message
from coarse.wire.snapshots import KeptTensor, SentTensor, SnapshotContents, write_request


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The constant part of requests, valid until another parameter gets its first state.

    Args:
        message: Its fields.
        counted: Parameter and state of each update count; these tensors are sent last.
    """

    message: Message
    counted: tuple[tuple[int, str], ...]


class SnapshotSaves:
    """Begins checkpoints from snapshots of one model's parameters and optimizer state.

    The constant part of requests is cached, to pause training as briefly as possible.

    Args:
        remote: The parameters that the memory devices hold.
        model: The parameters' model; wrapped or not.
        folder: Folder of all checkpoints.
        options: How to write.

    Raises:
        CheckpointError: If the model holds something that cannot be saved.
    """

    def __init__(
        self, remote: RemoteParameters, model: torch.nn.Module, folder: Path, options: WriteOptions
    ) -> None:
        self._remote = remote
        self._folder = folder
        self._options = options
        self._names: dict[torch.nn.Parameter, list[str]] = {}  # a tied parameter has several
        for name, parameter in bare(model).named_parameters(remove_duplicate=False):
            self._names.setdefault(parameter, []).append(name)
        held = {f"{MODEL_PREFIX}{name}" for each in remote.parameters for name in self._names[each]}
        self._beside = _TensorsBeside(model, held)
        self._requests: dict[tuple[Any, ...], _Request] = {}
        self._prepared_for = b""

    def are_of(self, remote: RemoteParameters) -> bool:
        """Whether these are the parameters that are saved."""
        return self._remote is remote

    def warm(self) -> None:
        """Makes the memory devices allocate the memory for a snapshot in advance and keep it. Returns at once."""
        self._remote.warm_snapshots()

    def prepare(self) -> None:
        """Prepares the slowest part of a save in advance; does nothing if no parameter got its first state since."""
        which = self._remote.which_have_state()
        if which != self._prepared_for:
            self._prepared_for = which
            self._request(self._take_beside())

    def take_over_writes(self) -> None:
        """Includes equal writes by all workers since the last update in the next snapshot. Collective."""
        self._remote.take_over_writes()

    def begin(self, step: int, details: SaveDetails) -> SnapshotWriting:
        """Takes a snapshot and returns the handle that writes it. Call it between two steps.

        Args:
            step: Number of updates that the state includes.
            details: Further data of the save.

        Raises:
            SnapshotsBusyError: If the largest possible number of snapshots exists already.
        """
        snapshot = self._remote.snapshot()
        try:
            beside = {name: tensor.to("cpu", copy=True) for name, tensor in self._take_beside().items()}
            request = self._request(beside)
            numbers = dict(self._remote.counts())
        except BaseException:
            snapshot.release()
            raise

        def ask() -> SnapshotWrite:
            sent: list[bytes | memoryview[Any]] = [
                memoryview(as_bytes(tensor.contiguous()).numpy()) for tensor in beside.values()
            ]
            sent += self._counts(request, numbers)
            fields = write_request(str(self._folder), details, self._options)
            return snapshot.write({**request.message, "step": step, **fields}, sent)

        return SnapshotWriting(step, snapshot, ask)

    def _take_beside(self) -> dict[str, torch.Tensor]:
        """Tensors that the memory devices do not hold, with the state of empty parameters, by checkpoint names."""
        beside = self._beside.take()
        for parameter, state in self._remote.empty.state():
            for name, value in state.items():
                beside[f"{OPTIMIZER_PREFIX}{name}.{self._names[parameter][0]}"] = torch.as_tensor(value)
        return beside

    def _request(self, beside: Mapping[str, torch.Tensor]) -> _Request:
        described_beside = [described(name, tensor) for name, tensor in beside.items()]
        key = (self._remote.which_have_state(), *described_beside)
        if key not in self._requests:
            self._requests = {key: self._make_request(described_beside)}
        return self._requests[key]

    def _make_request(self, beside: list[SavedTensor]) -> _Request:
        kept = [each for place in self._remote.places() for each in self._kept_tensors(*place)]
        counted = [
            (index, state)
            for index, num_updates in self._remote.counts()
            for state in self._remote.counted(num_updates)
        ]
        names = [self._names[parameter][0] for parameter in self._remote.parameters]
        beside = beside + [
            SavedTensor(name=f"{OPTIMIZER_PREFIX}{state}.{names[index]}", dtype="F32", shape=())
            for index, state in counted
        ]
        sent, offset = [], 0
        for tensor in beside:
            sent.append(SentTensor(saved=tensor, offset=offset))
            offset += tensor.nbytes
        contents = SnapshotContents(step=0, kept=tuple(kept), sent=tuple(sent))
        message = {name: value for name, value in contents.to_message().items() if name in ("kept", "sent")}
        return _Request(message=message, counted=tuple(counted))

    def _kept_tensors(
        self, parameter: torch.nn.Parameter, state: str, tensor: int, array: int
    ) -> list[KeptTensor]:
        names, order = self._names[parameter], _order(parameter)
        if state:
            name = f"{OPTIMIZER_PREFIX}{state}.{names[0]}"
            saved = [SavedTensor(name=name, dtype="F32", shape=tuple(parameter.shape))]
        else:
            saved = [described(f"{MODEL_PREFIX}{name}", parameter) for name in names]
        return [KeptTensor(saved=each, tensor=tensor, array=array, order=order) for each in saved]

    def _counts(self, request: _Request, numbers: Mapping[int, int]) -> list[bytes]:
        """Update counts of parameters, for optimizers that count; most parameters have the same count."""
        encoded = {
            number: {
                state: np.float32(value).tobytes() for state, value in self._remote.counted(number).items()
            }
            for number in set(numbers.values())
        }
        return [encoded[numbers[index]][state] for index, state in request.counted]


class SnapshotWriting:
    """A checkpoint that the home device writes: a Writing of coarse.checkpoint.saver.

    Args:
        step: Number of updates that the state includes.
        snapshot: The state.
        ask: Asks the device to write it; called in the thread that waits for the result.
    """

    def __init__(self, step: int, snapshot: Snapshot, ask: Callable[[], SnapshotWrite]) -> None:
        self.step = step
        self._snapshot = snapshot
        self._ask = ask
        self._write: SnapshotWrite | None = None

    def write(self, progress: Progress) -> CheckpointName:
        self._write = self._ask()
        return CheckpointName(*self._write.wait(progress))

    def verify(self, name: CheckpointName) -> None:
        assert self._write is not None
        self._write.wait_until_verified()

    def close(self) -> None:
        if self._write is not None:
            self._write.close()
        else:
            self._snapshot.release()


class _TensorsBeside:
    """The tensors of a model's state dict that the memory devices do not hold: buffers and untrained parameters.

    Args:
        model: Wrapped or not.
        held: Checkpoint names of the tensors that the memory devices hold.
    """

    def __init__(self, model: torch.nn.Module, held: set[str]) -> None:
        self._model = model
        self._held = held
        tensors = self._look_up()
        # Plain attributes are read directly, which avoids walking the whole model for each save.
        places = {name: _owner(bare(model), name.removeprefix(MODEL_PREFIX)) for name in tensors}
        self._places = {name: place for name, place in places.items() if place is not None}
        self._all_placed = len(self._places) == len(tensors)

    def take(self) -> dict[str, torch.Tensor]:
        """The tensors by their names in the checkpoint."""
        if not self._all_placed:
            return self._look_up()
        return {name: getattr(owner, attribute).detach() for name, (owner, attribute) in self._places.items()}

    def _look_up(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.detach()
            for name, tensor in model_tensors(self._model).items()
            if name not in self._held
        }


def _owner(module: torch.nn.Module, key: str) -> tuple[torch.nn.Module, str] | None:
    """The sub-module and its attribute for a key of the state dict; None if the attribute is not a plain one."""
    path, _, attribute = key.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None
    return (owner, attribute) if attribute in owner._buffers or attribute in owner._parameters else None


def _order(parameter: torch.Tensor) -> tuple[int, ...]:
    """Dimensions in memory order, the slowest first."""
    dimensions = range(parameter.dim())
    if parameter.is_contiguous():
        return tuple(dimensions)
    strides: Any = parameter.stride()
    return tuple(sorted(dimensions, key=lambda dimension: -strides[dimension]))

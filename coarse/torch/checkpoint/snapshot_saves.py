"""Checkpoints of an optimizer in the memory devices: a snapshot there, which the home device writes to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coarse.checkpoint.names import CheckpointName
from coarse.checkpoint.source import MODEL_PREFIX, OPTIMIZER_PREFIX, SavedTensor
from coarse.checkpoint.writer import Progress, SaveCancelledError, SaveDetails, WriteOptions
from coarse.client.memory.snapshots import Snapshot, SnapshotWrite
from coarse.errors import CoarseError
from coarse.torch.checkpoint.training_state import bare, described, model_tensors
from coarse.torch.gradients.layout import as_bytes
from coarse.torch.optimizer.remote_parameters import RemoteParameters
from coarse.wire.messages import Message
from coarse.wire.snapshots import KeptTensor, SentTensor, SnapshotContents, write_request


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What is the same in every request, as long as no parameter gets its first state.

    Args:
        message: Its fields.
        counted: Of which parameter and state each of the last tensors that are sent along is.
    """

    message: Message
    counted: tuple[tuple[int, str], ...]


class SnapshotSaves:
    """Begins checkpoints from snapshots of one model's parameters and optimizer state.

    What requests have in common is kept, so that training stands still for as short as possible.

    Args:
        offloaded: The parameters that the memory devices hold.
        model: What they belong to; wrapped or not.
        folder: Of all checkpoints.
        options: How to write.

    Raises:
        CheckpointError: If the model holds something that cannot be saved.
    """

    def __init__(
        self, offloaded: RemoteParameters, model: torch.nn.Module, folder: Path, options: WriteOptions
    ) -> None:
        self._offloaded = offloaded
        self._folder = folder
        self._options = options
        self._names: dict[torch.nn.Parameter, list[str]] = {}  # several of one that is tied
        for name, parameter in bare(model).named_parameters(remove_duplicate=False):
            self._names.setdefault(parameter, []).append(name)
        held = {f"{MODEL_PREFIX}{name}" for each in offloaded.parameters for name in self._names[each]}
        self._beside = _TensorsBeside(model, held)
        self._requests: dict[tuple[Any, ...], _Request] = {}
        self._prepared_for = b""

    def are_of(self, offloaded: RemoteParameters) -> bool:
        """Whether these are the parameters that are saved."""
        return self._offloaded is offloaded

    def warm(self) -> None:
        """Has the memory devices take the memory for a snapshot ahead, which they then keep. Returns at once."""
        self._offloaded.warm_snapshots()

    def prepare(self) -> None:
        """Does once, before a save, what takes longest; nothing if no parameter got its first state since."""
        which = self._offloaded.which_have_state()
        if which != self._prepared_for:
            self._prepared_for = which
            self._request(self._take_beside())

    def take_over_writes(self) -> None:
        """Has the next snapshot hold what workers have written alike since the last update. Collective."""
        self._offloaded.take_over_writes()

    def begin(self, step: int, details: SaveDetails) -> SnapshotWriting:
        """Takes a snapshot and has it written; between two steps.

        Args:
            step: How many updates the state has seen.
            details: What belongs to it.

        Raises:
            SnapshotsBusyError: If as many snapshots as there can be are held.
        """
        snapshot = self._offloaded.snapshot()
        try:
            beside = {name: tensor.to("cpu", copy=True) for name, tensor in self._take_beside().items()}
            request = self._request(beside)
            numbers = dict(self._offloaded.counts())
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
        """What the memory devices do not hold, by names in the checkpoint: also the state of empty parameters."""
        beside = self._beside.take()
        for parameter, state in self._offloaded.empty.state():
            for name, value in state.items():
                beside[f"{OPTIMIZER_PREFIX}{name}.{self._names[parameter][0]}"] = torch.as_tensor(value)
        return beside

    def _request(self, beside: Mapping[str, torch.Tensor]) -> _Request:
        described_beside = [described(name, tensor) for name, tensor in beside.items()]
        key = (self._offloaded.which_have_state(), *described_beside)
        if key not in self._requests:
            self._requests = {key: self._make_request(described_beside)}
        return self._requests[key]

    def _make_request(self, beside: list[SavedTensor]) -> _Request:
        kept = [each for place in self._offloaded.places() for each in self._kept_tensors(*place)]
        counted = [
            (index, state)
            for index, num_updates in self._offloaded.counts()
            for state in self._offloaded.counted(num_updates)
        ]
        names = [self._names[parameter][0] for parameter in self._offloaded.parameters]
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
        """How often parameters were updated, for optimizers that count; most have the same number."""
        encoded = {
            number: {
                state: np.float32(value).tobytes() for state, value in self._offloaded.counted(number).items()
            }
            for number in set(numbers.values())
        }
        return [encoded[numbers[index]][state] for index, state in request.counted]


class SnapshotWriting:
    """A checkpoint that the home device writes: a Writing of coarse.checkpoint.saver.

    Args:
        step: How many updates the state has seen.
        snapshot: The state.
        ask: Asks the device to write it; called in the thread that waits for it.
    """

    def __init__(self, step: int, snapshot: Snapshot, ask: Callable[[], SnapshotWrite]) -> None:
        self.step = step
        self._snapshot = snapshot
        self._ask = ask
        self._write: SnapshotWrite | None = None

    def write(self, progress: Progress, should_stop: Callable[[], bool]) -> CheckpointName:
        self._write = self._ask()
        try:
            step, attempt = self._write.wait(progress, should_stop)
        except CoarseError as error:
            if should_stop():
                raise SaveCancelledError(str(error)) from None
            raise
        return CheckpointName(step, attempt)

    def verify(self, name: CheckpointName, should_stop: Callable[[], bool]) -> None:
        assert self._write is not None
        try:
            self._write.wait_until_verified(should_stop)
        except CoarseError as error:
            if should_stop():
                raise SaveCancelledError(str(error)) from None
            raise

    def close(self) -> None:
        if self._write is not None:
            self._write.close()
        else:
            self._snapshot.release()


class _TensorsBeside:
    """The tensors of a model's state dict that the memory devices do not hold: buffers, and what is not trained.

    Args:
        model: Wrapped or not.
        held: Names, in the checkpoint, of what the memory devices hold.
    """

    def __init__(self, model: torch.nn.Module, held: set[str]) -> None:
        self._model = model
        self._held = held
        tensors = self._look_up()
        # Where a plain attribute is what the state dict has, the whole model need not be walked each time.
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
    """The sub-module, and its attribute, that a key of the state dict means; None if it is no plain one."""
    path, _, attribute = key.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return None
    return (owner, attribute) if attribute in owner._buffers or attribute in owner._parameters else None


def _order(parameter: torch.Tensor) -> tuple[int, ...]:
    """Dimensions as they lie in memory, the slowest first."""
    dimensions = range(parameter.dim())
    if parameter.is_contiguous():
        return tuple(dimensions)
    strides: Any = parameter.stride()
    return tuple(sorted(dimensions, key=lambda dimension: -strides[dimension]))

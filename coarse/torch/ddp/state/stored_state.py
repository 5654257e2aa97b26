"""The state of a worker in the parameter storage, for another worker: tensors as bytes, the rest as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from coarse.checkpoint.values import SmallTensor, from_json, to_json
from coarse.errors import CheckpointError, CoarseError, OutOfDeviceMemoryError
from coarse.session import Session
from coarse.torch.gradients.layout import contiguous_strides, is_dense, num_bytes

_KEY = "coarse/state of a member"
_PART_BYTES = 64 << 20
_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """The state that a worker holds itself.

    Args:
        tensors: Its model's tensors. Another worker has the same ones, which load_state() overwrites.
        values: Plain values and tensors, as for to_json(). Another worker gets copies.
    """

    tensors: Sequence[torch.Tensor]
    values: Any

    def check(self) -> None:
        """Raises CheckpointError if it cannot be stored; says why."""
        _to_plain(self.values)


def store_state(session: Session, state: OwnState, *, place: int) -> list[str]:
    """Stores a worker's state in place of the last one that was stored; returns the keys of its tensors' parts.

    Args:
        session: The worker's session.
        state: The state.
        place: States in different places do not overwrite each other's tensors.

    Raises:
        CheckpointError: If it contains a value that is not plain.
        OutOfDeviceMemoryError: If the memory devices cannot hold it; they then hold no tensors of it.
    """
    values, others = _to_plain(state.values)
    tensors = [*state.tensors, *others]
    places = _lay_out(tensors)
    num_parts = max((each.part + 1 for each in places), default=0)
    parts = [f"{_KEY}/{place}/{number}" for number in range(num_parts)]
    for number, key in enumerate(parts):
        try:
            _store_part(
                session, key, [each for each, at in zip(tensors, places, strict=True) if at.part == number]
            )
        except OutOfDeviceMemoryError:
            free_parts(session, parts[:number])
            raise
    fields = {
        "values": values,
        "places": list(map(asdict, places)),
        "own": len(state.tensors),
        "parts": parts,
    }
    _store_fields(session, fields)
    return parts


def store_refusal(session: Session, reason: str) -> None:
    """Stores, in place of a state, why there is none."""
    _store_fields(session, {"refused": reason})


def load_state(session: Session, tensors: Sequence[torch.Tensor]) -> Any:
    """Overwrites `tensors` with those of the state that was stored last; returns its other values.

    Raises:
        CoarseError: If the state could not be stored, or has other tensors.
    """
    fields = json.loads(bytes(session.load(_KEY).value))
    if reason := fields.get("refused"):
        raise CoarseError(reason)
    places = [_Place(**each) for each in fields["places"]]
    own, others = places[: fields["own"]], places[fields["own"] :]
    _check_alike(session.identity.rank, tensors, own)
    parts = [session.load(key).value for key in fields["parts"]]
    for tensor, place in zip(tensors, own, strict=True):
        place.copy_to(tensor, parts)
    copies = [place.read(parts) for place in others]
    return from_json(fields["values"], translate=lambda reference: copies[_number_of(reference)])


def free_parts(session: Session, keys: Iterable[str]) -> None:
    """Frees the memory of a stored state's tensors."""
    for key in keys:
        session.store(key, np.zeros(1, np.uint8))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A stored tensor: its layout, and its place in a part."""

    dtype: str
    shape: Sequence[int]
    strides: Sequence[int]
    part: int
    offset: int

    def read(self, parts: Sequence[memoryview[Any]]) -> torch.Tensor:
        """A copy in the host's memory."""
        dtype = getattr(torch, self.dtype)
        tensor = torch.empty_strided(self.shape, self.strides, dtype=dtype, device="cpu")
        self._fill(tensor, parts)
        return tensor

    def copy_to(self, tensor: torch.Tensor, parts: Sequence[memoryview[Any]]) -> None:
        """Overwrites a tensor of the same shape and dtype."""
        if tensor.is_cpu and list(tensor.stride()) == list(self.strides):
            self._fill(tensor, parts)
        else:
            with torch.no_grad():
                tensor.copy_(self.read(parts))

    def _fill(self, tensor: torch.Tensor, parts: Sequence[memoryview[Any]]) -> None:
        if size := num_bytes(tensor):
            stored = parts[self.part][self.offset : self.offset + size]
            _bytes_of(tensor)[:] = np.frombuffer(stored, np.uint8)


def _lay_out(tensors: Iterable[torch.Tensor]) -> list[_Place]:
    """Places tensors in parts, which are larger than _PART_BYTES only if a single tensor is."""
    places: list[_Place] = []
    part = end = 0
    for tensor in tensors:
        size = num_bytes(tensor)
        if size and end and end + size > _PART_BYTES:
            part, end = part + 1, 0
        places.append(
            _Place(
                dtype=_name_of(tensor.dtype),
                shape=tuple(tensor.shape),
                strides=_strides(tensor),
                part=part,
                offset=end,
            )
        )
        end += size
    return places


def _store_part(session: Session, key: str, tensors: Sequence[torch.Tensor]) -> None:
    pieces = [_bytes_of(_dense(tensor)) for tensor in tensors if tensor.numel()]
    if pieces:
        session.store(key, *pieces)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the host's memory, with _strides()."""
    tensor = tensor.detach().cpu()
    return tensor if is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides without holes: the tensor's own ones, or those of a contiguous copy."""
    strides = tuple(tensor.stride())
    return strides if is_dense(tensor.shape, strides) else contiguous_strides(tensor.shape)


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a tensor without holes."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return np.asarray(flat.view(torch.uint8).numpy())


def _check_alike(rank: int, tensors: Sequence[torch.Tensor], places: Sequence[_Place]) -> None:
    ours = [f"{_name_of(tensor.dtype)} {list(tensor.shape)}" for tensor in tensors]
    theirs = [f"{place.dtype} {list(place.shape)}" for place in places]
    if ours == theirs:
        return
    differing = (pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1])
    mine, other = next(differing, (f"{len(ours)} tensors", f"{len(theirs)} tensors"))
    raise CoarseError(
        f"worker {rank}: it holds {mine} of its model itself, and the others hold {other}; build the same model, "
        "buffers and DistributedOptimizers on all workers"
    )


def _to_plain(values: Any) -> tuple[Any, list[torch.Tensor]]:
    """Values for json, with the numbers of tensors in their places, and these tensors."""
    tensors: list[torch.Tensor] = []

    def numbered(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout is not torch.strided:
            raise CheckpointError(f"a {value.layout} tensor cannot be stored; convert it by to_dense()")
        tensors.append(value)
        return SmallTensor(dtype="I64", shape=(), data=(len(tensors) - 1).to_bytes(_NUMBER_BYTES, "little"))

    return to_json(values, translate=numbered, path="join_training"), tensors


def _number_of(reference: SmallTensor) -> int:
    """The number that _to_plain() has given a tensor."""
    return int.from_bytes(reference.data, "little")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _store_fields(session: Session, fields: Mapping[str, Any]) -> None:
    session.store(_KEY, np.frombuffer(json.dumps(fields).encode(), np.uint8))

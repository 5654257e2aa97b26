"""The safetensors format: a header with the place of each tensor, then the tensors without gaps.

The safetensors library writes files from tensors that are all in memory; a checkpoint streams them. The files are
identical. Source: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coarse.checkpoint.source import DTYPE_BYTES, SavedTensor
from coarse.errors import CheckpointError

LONGEST_HEADER_BYTES = 64 << 20
_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """The place of a tensor in a file.

    Args:
        tensor: The tensor.
        offset: Offset of its first byte from the beginning of the file.
    """

    tensor: SavedTensor
    offset: int

    @property
    def end(self) -> int:
        """Offset of the byte after its last one."""
        return self.offset + self.tensor.nbytes


def plan_files(tensors: Iterable[SavedTensor], *, file_bytes: int) -> list[list[SavedTensor]]:
    """Divides tensors among files of about `file_bytes`; a larger tensor gets its own file.

    Tensors with the largest elements come first, so that every tensor is aligned to its elements without gaps.
    """
    files: list[list[SavedTensor]] = []
    length = 0
    for tensor in sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype]):
        if not files or (files[-1] and length + tensor.nbytes > file_bytes):
            files.append([])
            length = 0
        files[-1].append(tensor)
        length += tensor.nbytes
    return files


def header_of(tensors: Sequence[SavedTensor], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file that holds `tensors` one after the other.

    Args:
        tensors: The tensors, in file order.
        metadata: Information for readers; strings only.
    """
    contents: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in tensors:
        contents[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(contents, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(read: Any, file_size: int) -> list[TensorPlace]:
    """The tensors of a file, in file order.

    Args:
        read: Takes an offset and a length; returns that many bytes, or fewer at the end of the file.
        file_size: Length of the file in bytes.

    Raises:
        CheckpointError: If it is not a safetensors file, or its tensors overlap, leave gaps or exceed the file.
    """
    start = read(0, _LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH_BYTES or length > min(LONGEST_HEADER_BYTES, file_size - _LENGTH_BYTES):
        raise CheckpointError(f"its header of {length} bytes does not fit: the file has {file_size}")
    try:
        contents = json.loads(read(_LENGTH_BYTES, length))
        entries = {name: entry for name, entry in contents.items() if name != "__metadata__"}
        found = [_placed(name, entry) for name, entry in entries.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its header cannot be read: {error}") from None
    found.sort(key=lambda each: (each[0], each[1]))
    places: list[TensorPlace] = []
    expected, data_start = 0, _LENGTH_BYTES + length
    for begin, end, tensor in found:
        if begin != expected or end - begin != tensor.nbytes:
            raise CheckpointError(
                f"tensor {tensor.name!r} lies from {begin} to {end}, which does not fit its neighbours"
            )
        places.append(TensorPlace(tensor=tensor, offset=data_start + begin))
        expected = end
    if data_start + expected != file_size:
        raise CheckpointError(
            f"its tensors end at byte {data_start + expected}, but the file ends at {file_size}"
        )
    return places


def _placed(name: str, entry: Any) -> tuple[int, int, SavedTensor]:
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} has the fields {sorted(entry)}")
    begin, end = entry["data_offsets"]
    lengths = entry["shape"]
    if not all(type(number) is int for number in (begin, end, *lengths)):
        raise ValueError(f"tensor {name!r} has a length that is not a whole number")
    return begin, end, SavedTensor(name=name, dtype=entry["dtype"], shape=tuple(lengths))

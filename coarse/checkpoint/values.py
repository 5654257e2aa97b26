"""Converts plain values to JSON and back, for optimizer settings and the user's state.

JSON has no tuples, bytes, non-finite numbers, arrays, or keys other than strings. They become objects with one key
that begins with a dollar sign, and so do objects that have such keys themselves.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coarse.checkpoint.source import DTYPE_BYTES, SavedTensor
from coarse.errors import CheckpointError

_MOST_LEVELS = 64
_PLAIN_DTYPE = re.compile(
    r"[<>|][a-zA-Z?]\d{1,9}(\[\w{1,20}\])?"
)  # numpy's notation; other notations are not evaluated

Translate = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTensor:
    """A framework's tensor among plain values.

    Args:
        dtype: Name in the safetensors format.
        shape: Lengths of its dimensions.
        data: Its bytes in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        needed = SavedTensor(name="value", dtype=self.dtype, shape=self.shape).nbytes
        if needed != len(self.data):
            raise ValueError(
                f"a tensor {self.dtype} of shape {self.shape} has {needed} bytes, not {len(self.data)}"
            )


def to_json(value: Any, *, translate: Translate = lambda value: value, path: str = "state") -> Any:
    """Converts `value` to a form that the json module writes; from_json() returns an equal value.

    Args:
        value: None, numbers, strings, bytes, lists, tuples, dictionaries, Counters, numpy arrays without fields and
            SmallTensors. Instances of their subclasses become instances of the base class.
        translate: Called first with each value: converts a framework's tensor to a SmallTensor.
        path: Place of the value, for error messages.

    Raises:
        CheckpointError: If the value is, or contains, any other type; names the place and the type.
    """
    if path.count("/") > _MOST_LEVELS:
        raise CheckpointError(f"{path} is nested more than {_MOST_LEVELS} levels deep")
    value = translate(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}

    def inner(part: Any, key: object) -> Any:
        return to_json(part, translate=translate, path=f"{path}/{key}")

    if isinstance(value, list):
        return [inner(part, index) for index, part in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [inner(part, index) for index, part in enumerate(value)]}
    if isinstance(value, Counter):  # such as the milestones of torch's MultiStepLR
        return {"$counter": [[inner(key, "key"), inner(part, key)] for key, part in value.items()]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: inner(part, key) for key, part in value.items()}
        return {"$dict": [[inner(key, "key"), inner(part, key)] for key, part in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _text(bytes(value))}
    if isinstance(value, (np.ndarray, np.generic)) and _has_plain_elements(value.dtype):
        return {"$array": [value.dtype.str, list(value.shape), _text(value.tobytes())]}
    if isinstance(value, SmallTensor):
        return {"$tensor": [value.dtype, list(value.shape), _text(value.data)]}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold; "
        "convert it to numbers, strings, bytes, lists, tuples, dictionaries or tensors"
    )


def from_json(value: Any, *, translate: Translate = lambda value: value) -> Any:
    """Returns the value from which to_json() made `value`.

    Args:
        value: As the json module reads it.
        translate: Called last with each SmallTensor: converts it to a framework's tensor.

    Raises:
        CheckpointError: If to_json() cannot have written it.
    """
    try:
        return _from_json(value, translate, 0)
    except (TypeError, ValueError, KeyError, OverflowError, binascii.Error) as error:
        raise CheckpointError(f"a value of the checkpoint cannot be read: {error}") from None


def _from_json(value: Any, translate: Translate, level: int) -> Any:
    if level > 2 * _MOST_LEVELS:
        raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")

    def inner(part: Any) -> Any:
        return _from_json(part, translate, level + 1)

    if isinstance(value, list):
        return [inner(part) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: inner(part) for key, part in value.items()}
    ((kind, contents),) = value.items()
    if kind == "$float":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[contents]
    if kind == "$tuple":
        return tuple(inner(part) for part in contents)
    if kind == "$dict":
        return {inner(key): inner(part) for key, part in contents}
    if kind == "$counter":
        return Counter({inner(key): inner(part) for key, part in contents})
    if kind == "$bytes":
        return _bytes(contents)
    if kind == "$array":
        return _array(*contents)
    if kind == "$tensor":
        dtype, shape, data = contents
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {dtype!r}")
        return translate(SmallTensor(dtype=dtype, shape=_lengths(shape), data=_bytes(data)))
    raise ValueError(f"unknown kind of value {kind!r}")


def _array(dtype: str, shape: Any, data: str) -> Any:
    lengths = _lengths(shape)
    if not _PLAIN_DTYPE.fullmatch(dtype) or not _has_plain_elements(kind := np.dtype(dtype)):
        raise ValueError(f"unknown array dtype {dtype[:80]!r}")
    if min(lengths, default=0) < 0:
        raise ValueError(f"impossible array shape {lengths}")
    array = np.frombuffer(_bytes(data), dtype=kind).reshape(lengths).copy()
    return array if lengths else array[()]


def _lengths(shape: Any) -> tuple[int, ...]:
    """A shape as to_json() writes it: whole numbers, not numbers that need rounding.

    Raises:
        ValueError: If it is anything else.
    """
    if not isinstance(shape, list) or any(type(length) is not int for length in shape):
        raise ValueError(f"{str(shape)[:80]} is not a shape: a list of whole numbers")
    return tuple(shape)


def _has_plain_elements(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype's name describes it fully, unlike dtypes of records and objects."""
    return not dtype.hasobject and dtype.fields is None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)

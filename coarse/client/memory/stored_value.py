"""A value that a worker has loaded from the parameter storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """The parameter storage's value for a key.

    Args:
        version: 1 for the first value ever stored under the key; 0 if none was stored.
        value: Its bytes, read-only; they do not change when the key gets a new value.
    """

    version: int
    value: memoryview[Any]

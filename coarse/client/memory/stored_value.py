"""What a worker gets from the parameter storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """What the parameter storage holds for a key.

    Args:
        version: 1 for the first value ever stored under the key; 0 if there is none.
        value: Its bytes, read-only; they stay as they are when the key gets a new value.
    """

    version: int
    value: memoryview[Any]

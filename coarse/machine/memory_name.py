"""Names of memories that a memory device can own: host, numa:2, dax:/dev/dax0.0, cuda:4 (docs/devices.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from coarse.machine.fields import FieldError

PLACE_KEYS: Mapping[str, str] = MappingProxyType(
    {"host": "", "numa": "node", "dax": "path", "cuda": "device"}
)
"""Kinds of memory, each with the partition table's key for the place; "" if only one memory of the kind exists."""

DEVICE_KINDS = tuple(PLACE_KEYS)
"""Kinds of memory that a memory device can own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryName:
    """Name of a memory of this machine, which may not exist. Different spellings of the same memory are equal.

    Args:
        kind: One of DEVICE_KINDS.
        place: The number of a NUMA node, the path of a DAX device, or the ordinal of a GPU; "" for the host's memory.

    Raises:
        ValueError: If the kind is unknown, or the place is not valid for the kind.

    Example:
        >>> str(MemoryName.parse("numa:2"))
        'numa:2'
    """

    kind: str = "host"
    place: str = ""

    def __post_init__(self) -> None:
        if self.kind not in DEVICE_KINDS:
            raise FieldError("kind", f"kind {self.kind!r} must be one of {', '.join(DEVICE_KINDS)}")
        key = PLACE_KEYS[self.kind]
        if self.kind == "host" and self.place:
            raise FieldError("kind", f"memory of kind host takes no place, but got {self.place!r}")
        if self.kind == "numa" and not self.place.isdecimal():
            raise FieldError(
                key,
                f"{key} {self.place!r} is not the number of a NUMA node; write numa:2, for example, or node = "
                "2 in a partition table",
            )
        if self.kind == "cuda" and not self.place.isdecimal():
            raise FieldError(
                key,
                f"{key} {self.place!r} is not the ordinal of a GPU; write cuda:4, for example, or "
                'device = "cuda:4" in a partition table',
            )
        if self.kind == "dax" and not self.place.startswith("/"):
            raise FieldError(
                key,
                f"{key} {self.place!r} is not an absolute path of a DAX device; write /dev/dax0.0, for example",
            )
        object.__setattr__(self, "place", self._usual_place())

    def _usual_place(self) -> str:
        if self.kind in ("numa", "cuda"):
            return str(int(self.place))
        return os.path.realpath(self.place) if self.kind == "dax" else self.place

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}" if self.place else self.kind

    @classmethod
    def parse(cls, text: str) -> MemoryName:
        """Reads the output of str().

        Raises:
            ValueError: If the text is not the name of a memory.
        """
        kind, _, place = text.strip().partition(":")
        return cls(kind=kind, place=place)


def parse_memory_devices(text: str) -> int | tuple[MemoryName, ...]:
    """Reads a number of memory devices, such as "3", or a memory for each, such as "host,numa:2".

    Raises:
        ValueError: If it is neither.
    """
    if text.strip().lstrip("+-").isdecimal():
        return int(text)
    if not text.strip():
        raise ValueError("it names no memory device")
    return tuple(map(MemoryName.parse, text.split(",")))

"""The memory devices that hold the values of the parameter storage (COARSE paper, section III-D)."""

from __future__ import annotations

import zlib


def holders_of(key: str, num_devices: int, replicas: int = 0) -> tuple[int, ...]:
    """The memory devices that keep a key's value: first the one that serves requests, then those with replicas."""
    first = zlib.crc32(key.encode()) % num_devices
    return tuple((first + place) % num_devices for place in range(replicas + 1))

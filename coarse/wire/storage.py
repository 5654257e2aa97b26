"""Where the values of the parameter storage lie (COARSE paper, section III-D)."""

from __future__ import annotations

import zlib


def holders_of(key: str, num_devices: int, replicas: int = 0) -> tuple[int, ...]:
    """The memory devices that keep the value of a key: the one that is asked for it, then those with a replica."""
    first = zlib.crc32(key.encode()) % num_devices
    return tuple((first + place) % num_devices for place in range(replicas + 1))

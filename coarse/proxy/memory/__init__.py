"""The memories of memory devices. Outside this folder, only the NCCL code depends on the kind of memory; code that
plans for all devices of a node uses PartitionTable.is_on_gpus.

A memory's name is its kind and, if several of a kind exist, its place: "host", "numa:2", "dax:/dev/dax0.0"
(docs/devices.md).
"""

from coarse.proxy.memory.device_memory import (
    DeviceMemories,
    DeviceMemory,
    available_bytes,
    open_memories,
    open_memory,
    require_compiler,
    try_memory,
)
from coarse.proxy.memory.host import HostMemory

__all__ = [
    "DeviceMemories",
    "DeviceMemory",
    "HostMemory",
    "available_bytes",
    "open_memories",
    "open_memory",
    "require_compiler",
    "try_memory",
]

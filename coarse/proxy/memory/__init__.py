"""Where a memory device keeps its bytes. Of the rest of it, only what joins NCCL knows which kind of memory that is;
who plans for all devices of a node asks PartitionTable.is_on_gpus.

A memory is named by its kind and, where there are several of a kind, its place: "host", "numa:2",
"dax:/dev/dax0.0" (docs/devices.md).
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

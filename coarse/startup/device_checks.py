"""Checks, before memory devices start, that they support the settings."""

from __future__ import annotations

from coarse.machine.partition_table import PartitionTable, choose_partition_table
from coarse.profiler.start import AUTO, CACHED, OFF
from coarse.proxy.memory import available_bytes, require_compiler, try_memory
from coarse.settings import Settings
from coarse.wire.algorithms import NCCL, check_nccl

_GPU_LINKS = "links to GPUs are measured when tensors are first registered; until then routes are local"


def check_node(settings: Settings, *, num_workers: int, num_nodes: int) -> None:
    """Checks a node's planned memory devices, and allocates a little of each memory that they will own.

    For a launcher, which has no framework and does not use GPUs: creates no CUDA context.

    Args:
        settings: Settings of the planned sessions.
        num_workers: Number of workers on this node.
        num_nodes: Number of nodes of the job.

    Raises:
        ValueError, CoarseError: If such a memory or table does not exist, the table is for more workers, another
            process uses the memory exclusively, no compiler for GPU kernels is available, or check_devices() refuses
            the devices in a job of several workers.
    """
    is_solo = num_workers * num_nodes == 1
    path = settings.partition_table
    if path:  # a smaller table may serve a process group of some of the workers
        num_workers = min(num_workers, PartitionTable.load(path).num_workers)
    table = choose_partition_table(path, num_workers=num_workers, devices=settings.memory_devices)
    if not is_solo:
        check_devices(settings, table, num_nodes=num_nodes)
    for memory in dict.fromkeys(table.memories):
        try_memory(memory)
        require_compiler(memory)


def check_devices(settings: Settings, table: PartitionTable, *, num_nodes: int) -> None:
    """Raises ValueError, with advice, for settings that memory devices of this kind or number do not support."""
    if table.is_on_gpus:
        _check_gpus(settings, num_nodes)
    if table.is_on_gpus and settings.least_workers:
        raise ValueError(
            "a job goes on without lost workers only if its memory devices use the memory of the host, not of GPUs; "
            "set COARSE_MEMORY_DEVICES to a number, or unset COARSE_MIN_WORKERS"
        )
    if settings.algorithm == NCCL:
        check_nccl(table)
    if settings.replicas:
        _check_replicas(table)


def cannot_profile(settings: Settings, table: PartitionTable, *, num_nodes: int, num_vacant: int) -> str:
    """Why the links of these memory devices cannot be profiled; "" if they can."""
    if num_nodes > 1:
        return "only jobs on one node have profiles"
    if num_vacant:
        return "nobody measures the links of vacant places"
    if table.is_on_gpus and not settings.machine:
        return _GPU_LINKS
    return ""


def _check_gpus(settings: Settings, num_nodes: int) -> None:
    if num_nodes > 1 and settings.routing == "profile":
        raise ValueError(
            "COARSE_ROUTING=profile works only within one node if memory devices are on GPUs, but this job "
            f"has {num_nodes} nodes; unset it"
        )
    if settings.machine and num_nodes > 1:
        raise ValueError(
            "links between nodes are emulated for tensors in host memory, but memory devices are on GPUs and this "
            f"job has {num_nodes} nodes; set COARSE_MEMORY_DEVICES to a number, or unset COARSE_MACHINE"
        )
    if settings.machine:
        return
    if settings.routing == "profile" and settings.keep_devices:
        raise ValueError(
            "COARSE_ROUTING=profile cannot be combined with COARSE_KEEP_DEVICES and memory devices on GPUs: "
            "each attempt measures the links anew, but kept tensors cannot move; unset one of them"
        )
    if settings.profile not in (OFF, CACHED, AUTO):
        raise ValueError(
            f"COARSE_PROFILE={settings.profile} cannot be combined with memory devices on GPUs, whose links "
            "are measured when tensors are first registered; set it to cached or off"
        )


def _check_replicas(table: PartitionTable) -> None:
    """Raises ValueError unless another memory device can hold a replica of any memory device."""
    if table.num_devices < 2:
        raise ValueError(
            "COARSE_REPLICAS=1 needs a second memory device to hold the copy, but there is only one; start "
            "two or more (COARSE_MEMORY_DEVICES), or unset COARSE_REPLICAS"
        )
    if sum(bool(device.workers) for device in table.devices) < 2:
        raise ValueError(
            "COARSE_REPLICAS=1 needs gradients in the memory of two devices, to repeat a step after one is "
            "lost, but one device serves all workers; spread the workers in the partition table, or unset "
            "COARSE_REPLICAS"
        )


def least_available_bytes(table: PartitionTable) -> int:
    """The smallest number of available bytes of any of the table's memories."""
    return min(map(available_bytes, table.memories))

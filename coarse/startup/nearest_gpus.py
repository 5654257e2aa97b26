"""Pairs workers on GPUs with the nearest memory devices, if no partition table assigns them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from coarse.errors import CoarseError
from coarse.kernels import _native
from coarse.machine.gpu_topology import read_gpu_topology, workers_of_gpus, workers_of_nodes
from coarse.machine.partition_table import PartitionTable

_logger = logging.getLogger(__name__)


def pair_with_nearest(table: PartitionTable) -> PartitionTable:
    """The same memory devices, each serving the workers that are nearest to it, as evenly as before.

    gpus_of_workers() guesses the GPU of each worker. The table changes only if all memory devices are on GPUs, or all
    are on several NUMA nodes. It does not change without CUDA, with only one GPU, or if NVML cannot report how GPUs
    are connected, which is logged.

    Args:
        table: A table that assigns workers in even blocks.
    """
    kinds = {device.memory.kind for device in table.devices}
    is_on_nodes = kinds == {"numa"} and len(set(table.memories)) > 1
    if not (kinds == {"cuda"} or is_on_nodes) or _native.cuda_unavailable_reason():
        return table
    try:
        uuids = [_native.cuda_device_uuid(gpu) for gpu in range(_native.cuda_num_devices())]
        if len(uuids) < 2:
            return table
        served = _served(table, uuids, is_on_nodes=is_on_nodes)
    except (CoarseError, ValueError, _native.CudaError) as error:
        _logger.warning("workers are paired with memory devices by number, not by distance: %s", error)
        return table
    return PartitionTable.of_workers(served, [device.memory for device in table.devices])


def _served(table: PartitionTable, uuids: Sequence[str], *, is_on_nodes: bool) -> tuple[tuple[int, ...], ...]:
    places = [int(device.memory.place) for device in table.devices]
    topology = read_gpu_topology()
    if is_on_nodes:
        from coarse.machine.host import read_numa_nodes  # slow to import, and only needed here

        nodes = read_numa_nodes()
        return workers_of_nodes(topology, uuids, nodes, devices=places, num_workers=table.num_workers)
    return workers_of_gpus(topology, uuids, devices=places, num_workers=table.num_workers)

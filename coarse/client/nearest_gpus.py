"""Workers and memory devices on GPUs that sit close to each other, where no partition table says who serves whom."""

from __future__ import annotations

import logging

from coarse.errors import CoarseError
from coarse.kernels import _native
from coarse.machine.gpu_topology import read_gpu_topology, workers_of_gpus
from coarse.machine.partition_table import PartitionTable

_logger = logging.getLogger(__name__)


def pair_with_nearest(table: PartitionTable) -> PartitionTable:
    """The same memory devices, each serving the workers that are nearest to it, as evenly as before.

    Worker r is taken to be on GPU r. Nothing changes where there is no CUDA or one GPU only, or where NVML cannot say
    how GPUs are connected; the latter is logged.

    Args:
        table: Of memory devices on GPUs.
    """
    if _native.cuda_unavailable_reason():
        return table
    uuids = [_native.cuda_device_uuid(gpu) for gpu in range(_native.cuda_num_devices())]
    if len(uuids) < 2:
        return table
    memories = [device.memory for device in table.devices]
    try:
        served = workers_of_gpus(
            read_gpu_topology(),
            uuids,
            devices=[int(memory.place) for memory in memories],
            num_workers=table.num_workers,
        )
    except (CoarseError, ValueError) as error:
        _logger.warning("workers are paired with memory devices by number, not by distance: %s", error)
        return table
    return PartitionTable.of_workers(served, memories)

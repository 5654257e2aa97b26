"""Measures the paths between workers on GPUs and memory devices on other GPUs; plans routes and shards from them.

Method and reasons: docs/design/gpu.md, "Routes" and "Shards".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from coarse.client.memory.tensor_bytes import gpu_context
from coarse.kernels import _native
from coarse.machine.partition_table import PartitionTable
from coarse.profiler.curve import Curve
from coarse.profiler.gpu_links import CopyTimer
from coarse.profiler.link_plan import DEFAULT_SHARD_BYTES
from coarse.profiler.routing import RoutingTable, plan_tables
from coarse.profiler.shard_size import ShardSize, common_shard_size
from coarse.schema import TensorSpec
from coarse.wire.algorithms import DIRECT

if TYPE_CHECKING:
    from coarse.client.tensor_group import TensorGroup

logger = logging.getLogger(__name__)

SIZES = tuple(4096 << power for power in range(13))
"""4 KiB to 16 MiB."""

_NUM_TRIALS = 4  # the first is a warm-up and is not counted
_ENDS = TensorSpec(name="ends", dtype="uint8", num_elements=2 * SIZES[-1], op="sum")

NOTHING_TO_COPY = 0.0
"""Used as the time of a worker whose tensors are its slots."""

Times = npt.NDArray[np.float64]


class TrialClient(Protocol):
    """Registers tensors for trials that measure ways between GPUs."""

    @property
    def number(self) -> int:
        """This worker's client number."""

    @property
    def shard_bytes(self) -> int:
        """Partition threshold of later registrations."""

    @property
    def table(self) -> PartitionTable:
        """The memory devices of the node and the workers that each serves."""

    def all_reduce(
        self, address: int, num_elements: int, dtype: str, op: str, *, present: bool = True
    ) -> None:
        """Reduces an unregistered buffer in place."""

    def register_trial(
        self,
        name: str,
        spec: TensorSpec,
        algorithm: str,
        gpu: str,
        routes: tuple[RoutingTable, ...] = (),
        *,
        shard_bytes: int = 0,
        is_for_gpu: bool = False,
    ) -> TensorGroup:
        """Registers a tensor for reduction by one algorithm, regardless of the settings."""


def measure_links(client: TrialClient, gpu: str) -> Times:
    """Times the paths of every worker to every memory device; every worker must call it, and gets the same times.

    Workers take turns, so that each path is measured alone.

    Args:
        client: This worker's client; its memory devices are on GPUs.
        gpu: GPU of this worker's tensors, as for Client.register().

    Returns:
        The `times_us` of plan_routes().

    Raises:
        OutOfDeviceMemoryError: If a memory device has less than 32 MiB for each worker.
    """
    num_workers, num_devices = client.table.num_workers, client.table.num_devices
    times_us = np.zeros((num_workers, num_devices, len(SIZES)))
    for device in range(num_devices):
        there = (RoutingTable(lat_proxy=device, bw_proxy=device),) * num_workers
        group = client.register_trial(f"link to md{device}", _ENDS, DIRECT, gpu, there, is_for_gpu=True)
        for worker in range(num_workers):
            if worker == client.number:
                is_own = device == client.table.local_device(worker)
                times_us[worker, device] = _measure(group, gpu, is_own=is_own)
            wait_for_all(client)
        group.close()
    client.all_reduce(times_us.ctypes.data, times_us.size, "float64", "sum")
    return times_us


def wait_for_all(client: TrialClient) -> None:
    """Returns when every worker of the node has called it."""
    number = np.zeros(1)
    client.all_reduce(number.ctypes.data, 1, "float64", "sum")


def plan_routes(times_us: Times, local_devices: Sequence[int]) -> tuple[RoutingTable, ...]:
    """The routing table of each worker; a pure function.

    Args:
        times_us: Time of a simultaneous push and pull, by worker, memory device and size (SIZES). Infinite if a
            worker has no GPU, or its GPU does not reach the memory device's; NOTHING_TO_COPY if its tensors are its
            slots.
        local_devices: The memory device of each worker.
    """
    curves = [_curves(times_us[worker]) for worker in range(len(local_devices))]
    tables = [
        RoutingTable(lat_proxy=local, bw_proxy=local, reasons=(_why_local(times_us[worker, local], own),))
        for worker, (local, own) in enumerate(zip(local_devices, curves, strict=True))
    ]
    free = [worker for worker, table in enumerate(tables) if not table.reasons[0]]
    # A worker that does not reach its own memory device uses the first one that it reaches instead.
    nearest = [
        local_devices[worker] if local_devices[worker] in curves[worker] else min(curves[worker])
        for worker in free
    ]
    planned = plan_tables([curves[worker] for worker in free], nearest)
    for worker, table in zip(free, planned, strict=True):
        tables[worker] = table
    return tuple(tables)


def plan_shards(times_us: Times, tables: Sequence[RoutingTable]) -> ShardSize | None:
    """The size of shards that fills the links of all workers which copy tensors, but at least the default size.

    A pure function.

    Args:
        times_us: As for plan_routes().
        tables: The routing table of each worker, whose BwProxy counts.

    Returns:
        None if no worker copies its tensors over a link that was measured.
    """
    curves = [_curves(times_us[worker]) for worker in range(len(tables))]
    used = [own[table.bw_proxy] for own, table in zip(curves, tables, strict=True) if table.bw_proxy in own]
    if not used:
        return None
    size = common_shard_size(used)
    if size.nbytes >= DEFAULT_SHARD_BYTES:
        return size
    reason = f"the default, for links need less (the {size.reason})"
    return replace(size, nbytes=DEFAULT_SHARD_BYTES, reason=reason)


def _why_local(to_own_us: Times, curves: Mapping[int, Curve]) -> str:
    """Why a worker has no choice of routes; "" if it has one."""
    if (to_own_us == NOTHING_TO_COPY).all():
        return "tensors of this worker are its slots"
    return "" if curves else "tensors of this worker are on no GPU that reaches a memory device"


def _curves(times_us: Times) -> dict[int, Curve]:
    """Curves by memory device, for reachable devices to which a worker copies."""
    return {
        device: Curve.from_repeats(
            {size: [time] for size, time in zip(SIZES, map(float, times), strict=True)}
        )
        for device, times in enumerate(times_us)
        if np.isfinite(times).all() and (times > NOTHING_TO_COPY).all()
    }


def _measure(group: TensorGroup, gpu: str, *, is_own: bool) -> Times:
    """This worker's times by size, to the memory device that has the group's slots."""
    slots = group.address_on_gpu
    unreached = np.full(len(SIZES), np.inf)
    if slots == 0:
        return unreached
    if is_own and group.is_on_gpu:
        return np.full(len(SIZES), NOTHING_TO_COPY)
    try:
        return _times_us(gpu_context(gpu), slots)
    except _native.CudaError as error:  # no error, because other workers wait for this one
        logger.warning("links of %s cannot be measured: %s", gpu, error)
        return unreached


def _times_us(context: _native.CudaContext, slots: int) -> Times:
    """Times of simultaneous copies to and from slots, by size."""
    tensors = _native.CudaMemory.allocate(context, _ENDS.nbytes)
    half = SIZES[-1]
    timer = CopyTimer(context)

    def time_us(size: int) -> float:
        return timer.time_us(
            [
                lambda stream: stream.copy_on_device(slots, tensors.address, size),
                lambda stream: stream.copy_on_device(tensors.address + half, slots + half, size),
            ]
        )

    return np.array([median([time_us(size) for _ in range(_NUM_TRIALS)][1:]) for size in SIZES])

"""Finds the fastest way to reduce large tensors between the GPUs of memory devices by trying each way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coarse.client.gpu.gpu_routes import TrialClient, measure_routes, wait_for_all
from coarse.client.memory.tensor_bytes import gpu_context
from coarse.errors import CoarseError, OutOfDeviceMemoryError, is_refusal
from coarse.kernels import _native
from coarse.profiler.routing import RoutingTable, with_threshold
from coarse.schema import TensorSpec

if TYPE_CHECKING:
    from coarse.client.tensor_group import TensorGroup
    from coarse.settings import Settings

logger = logging.getLogger(__name__)

_TRIAL = TensorSpec(name="trial", dtype="float32", num_elements=(32 << 20) // 4, op="mean")
_NUM_TRIALS = 5  # the first is a warm-up and is not counted


class Way(NamedTuple):
    """One of the ways to reduce.

    Attributes:
        algorithm: Name of the algorithm.
        is_routed: Whether slots follow the routing tables instead of lying on each worker's own memory device.
    """

    algorithm: str
    is_routed: bool = False

    def __str__(self) -> str:
        return f"{self.algorithm} along the routes" if self.is_routed else self.algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChoice:
    """The fastest of several ways.

    Args:
        seconds: Time of a push and a pull of all workers, for each way; unused if only one way exists.
        routes: The routing table of each worker; () if none was measured.
    """

    seconds: Mapping[Way, float]
    routes: tuple[RoutingTable, ...] = ()

    def fastest(self, algorithm: str = "") -> Way:
        """The fastest of all ways, or of those of one algorithm."""
        ways = [way for way in self.seconds if algorithm in ("", way.algorithm)]
        return min(ways, key=self.seconds.__getitem__, default=Way(algorithm))

    def routes_of(self, way: Way) -> tuple[RoutingTable, ...]:
        """The routing tables for the slots; () if slots lie on each worker's own memory device."""
        return self.routes if way.is_routed else ()

    def describe(self) -> list[str]:
        """The measurements and the resulting choice, in words."""
        chosen = f"large tensors between memory devices by {self.fastest()}"
        if len(self.seconds) > 1:
            times = ", ".join(f"{seconds * 1e3:.2f} ms by {way}" for way, seconds in self.seconds.items())
            chosen += f": {_TRIAL.nbytes >> 20} MiB took {times}"
        return [chosen] + [f"w{worker} along the routes: {table}" for worker, table in enumerate(self.routes)]


def measure_ways(client: TrialClient, ways: Sequence[Way], gpu: str, settings: Settings) -> AlgorithmChoice:
    """Times each way; every worker must call it with the same ways, and gets the same choice.

    Args:
        client: This worker's client.
        ways: The ways that the memory devices support. Routed ways are tried if some worker has a better path than
            that to its own memory device.
        gpu: GPU of this worker's tensors, as for Client.register().
        settings: The session's settings. COARSE_ROUTING=profile then chooses a routed way regardless of the times.
    """
    is_routed = any(way.is_routed for way in ways) and _is_any_on_gpu(client, gpu)
    routes = _measured_routes(client, gpu) if is_routed else ()
    if settings.routing_threshold_bytes:
        routes = tuple(with_threshold(table, settings.routing_threshold_bytes) for table in routes)
    else:
        routes = tuple(_for_whole_tensors(table, client.shard_bytes) for table in routes)
    if not _leads_elsewhere(client, routes):
        ways = [way for way in ways if not way.is_routed]
    elif settings.routing == "profile":
        ways = [way for way in ways if way.is_routed]
    if len(ways) == 1:
        return AlgorithmChoice(seconds={ways[0]: 0.0}, routes=routes)
    seconds = np.array([_least_seconds(client, way, gpu, routes if way.is_routed else ()) for way in ways])
    client.all_reduce(seconds.ctypes.data, len(ways), "float64", "max")
    return AlgorithmChoice(seconds=dict(zip(ways, map(float, seconds), strict=True)), routes=routes)


def _for_whole_tensors(table: RoutingTable, shard_bytes: int) -> RoutingTable:
    """The routing table for tensors of at least one shard that are copied as a whole, regardless of shards."""
    return replace(table, threshold_bytes=min(table.threshold_bytes, shard_bytes))


def _measured_routes(client: TrialClient, gpu: str) -> tuple[RoutingTable, ...]:
    try:
        return measure_routes(client, gpu)
    except OutOfDeviceMemoryError as error:  # every worker gets it
        logger.warning(
            "tensors stay with the workers' own memory devices, for links cannot be measured: %s", error
        )
        return ()


def _is_any_on_gpu(client: TrialClient, gpu: str) -> bool:
    """Whether any worker has its tensors on a GPU."""
    number = np.array([float(bool(gpu))])
    client.all_reduce(number.ctypes.data, 1, "float64", "max")
    return bool(number[0])


def _leads_elsewhere(client: TrialClient, routes: Sequence[RoutingTable]) -> bool:
    return any(
        device != client.table.local_device(worker)
        for worker, table in enumerate(routes)
        for device in (table.lat_proxy, table.bw_proxy)
    )


def _least_seconds(client: TrialClient, way: Way, gpu: str, routes: tuple[RoutingTable, ...]) -> float:
    try:
        group = client.register_trial(f"trial of {way}", _TRIAL, way.algorithm, gpu, routes)
    except CoarseError as error:
        if not way.is_routed or not is_refusal(error):
            raise
        logger.warning("tensors stay with the workers' own memory devices: %s", error)
        return float("inf")
    exchange = _exchange_of(group, gpu)
    times = []
    for _ in range(_NUM_TRIALS):
        wait_for_all(client)
        begin = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - begin)
    group.close()
    return min(times[1:])


def _exchange_of(group: TensorGroup, gpu: str) -> Callable[[], None]:
    """A push and a pull of a group's single tensor, from and to the memory of this worker's tensors."""

    def exchange() -> None:
        group.push(0)
        group.pull_all()

    def exchange_from_gpu() -> None:
        transfers.push([(0, _native.PRESENT, memory.address, memory.address, 0)], stream.handle)
        transfers.join(stream.handle)
        stream.synchronize()

    if group.is_on_gpu or not gpu:
        return exchange
    context = gpu_context(gpu)
    try:
        memory, stream = _native.CudaMemory.allocate(context, _TRIAL.nbytes), _native.CudaStream(context)
        transfers = group.open_gpu_transfers(context)
    except _native.CudaError:  # registration reports it later and copies by the processor
        return exchange
    return exchange_from_gpu

"""Finds the fastest way to reduce large tensors between the GPUs of memory devices by trying each way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coarse.client.gpu.gpu_routes import (
    Times,
    TrialClient,
    measure_links,
    plan_routes,
    plan_shards,
    wait_for_all,
)
from coarse.client.memory.tensor_bytes import gpu_context
from coarse.errors import CoarseError, OutOfDeviceMemoryError, is_refusal
from coarse.kernels import _native
from coarse.profiler.routing import DEFAULT_MARGIN, RoutingTable, with_threshold
from coarse.profiler.shard_size import ShardSize
from coarse.schema import TensorSpec

if TYPE_CHECKING:
    from coarse.client.tensor_group import TensorGroup
    from coarse.settings import Settings
    from coarse.wire.registration import GroupSchema

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
        shard_size: Size of the shards, by the links of the workers' GPUs; None if they do not determine it.
    """

    seconds: Mapping[Way, float]
    routes: tuple[RoutingTable, ...] = ()
    shard_size: ShardSize | None = None

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
        lines = [
            chosen,
            *(f"w{worker} along the routes: {table}" for worker, table in enumerate(self.routes)),
        ]
        if (size := self.shard_size) is not None:
            lines.append(f"shards of at least {size.nbytes} bytes between GPUs: {size.reason}")
        return lines


def measure_ways(client: TrialClient, ways: Sequence[Way], gpu: str, settings: Settings) -> AlgorithmChoice:
    """Times each way; every worker must call it with the same ways, and gets the same choice.

    Args:
        client: This worker's client.
        ways: The ways that the memory devices support. Routed ways are tried if some worker has a better path than
            that to its own memory device.
        gpu: GPU of this worker's tensors, as for Client.register().
        settings: The session's settings. COARSE_ROUTING=profile then chooses a routed way regardless of the times.
    """
    is_routed = any(way.is_routed for way in ways)
    plan = _LinkPlan()
    if is_routed or not settings.shard_bytes:
        plan = _plan_by_links(client, gpu, settings, is_routed=is_routed, shard_bytes=settings.shard_bytes)
    routes, size = plan.routes, plan.shard_size
    if not _leads_elsewhere(client, routes):
        ways = [way for way in ways if not way.is_routed]
    elif settings.routing == "profile":
        ways = [way for way in ways if way.is_routed]
    if len(ways) == 1:
        return AlgorithmChoice(seconds={ways[0]: 0.0}, routes=routes, shard_size=size)
    shard_bytes = client.shard_bytes if size is None else size.nbytes
    trials = [(way, routes if way.is_routed else ()) for way in ways]
    seconds = _slowest_seconds(client, trials, gpu, shard_bytes)
    return AlgorithmChoice(seconds=dict(zip(ways, seconds, strict=True)), routes=routes, shard_size=size)


def better_routes(
    client: TrialClient, gpu: str, settings: Settings, schema: GroupSchema
) -> tuple[RoutingTable, ...]:
    """Routes by the links as they are now, if a trial along them saves a tenth of the time; () otherwise.

    Every worker must call it, and gets the same routes.

    Args:
        client, gpu, settings: As for measure_ways().
        schema: The tensors that the routes are for, along their present routes; its algorithm allows routes.
    """
    shard_bytes = schema.shard_bytes
    found = _plan_by_links(client, gpu, settings, is_routed=True, shard_bytes=shard_bytes).routes
    if not found or found == (schema.routes or _local_routes(client)):
        return ()
    way = Way(schema.large_algorithm, is_routed=True)
    before, after = _slowest_seconds(client, [(way, schema.routes), (way, found)], gpu, shard_bytes)
    return found if after < (1 - DEFAULT_MARGIN) * before else ()


def is_any(client: TrialClient, holds: bool) -> bool:
    """Whether something holds for any worker; every worker must call it."""
    number = np.array([float(holds)])
    client.all_reduce(number.ctypes.data, 1, "float64", "max")
    return bool(number[0])


class _LinkPlan(NamedTuple):
    """Routes and shard size that follow from the measured links.

    Attributes:
        routes: The routing table of each worker; () if slots have no choice.
        shard_size: Size of the shards; None if no link determines it.
    """

    routes: tuple[RoutingTable, ...] = ()
    shard_size: ShardSize | None = None


def _plan_by_links(
    client: TrialClient, gpu: str, settings: Settings, *, is_routed: bool, shard_bytes: int
) -> _LinkPlan:
    """Measures the links, and plans routes if `is_routed`, and the size of shards if `shard_bytes` is 0."""
    times_us = _measured_links(client, gpu)
    if times_us is None:
        return _LinkPlan()
    local = _local_routes(client)
    tables = plan_routes(times_us, [table.bw_proxy for table in local]) if is_routed else local
    size = None if shard_bytes else plan_shards(times_us, tables)
    if not is_routed:
        return _LinkPlan(shard_size=size)
    if settings.routing_threshold_bytes:
        routes = tuple(with_threshold(table, settings.routing_threshold_bytes) for table in tables)
    else:
        whole_bytes = shard_bytes or (client.shard_bytes if size is None else size.nbytes)
        routes = tuple(_for_whole_tensors(table, whole_bytes) for table in tables)
    return _LinkPlan(routes=routes, shard_size=size)


def _local_routes(client: TrialClient) -> tuple[RoutingTable, ...]:
    devices = map(client.table.local_device, range(client.table.num_workers))
    return tuple(RoutingTable(lat_proxy=device, bw_proxy=device) for device in devices)


def _for_whole_tensors(table: RoutingTable, shard_bytes: int) -> RoutingTable:
    """The routing table for tensors of at least one shard that are copied as a whole, regardless of shards."""
    return replace(table, threshold_bytes=min(table.threshold_bytes, shard_bytes))


def _measured_links(client: TrialClient, gpu: str) -> Times | None:
    """Times of the links, as for plan_routes(); None if no worker has a GPU, or memory is short."""
    if not is_any(client, bool(gpu)):
        return None
    try:
        return measure_links(client, gpu)
    except OutOfDeviceMemoryError as error:  # every worker gets it
        logger.warning(
            "tensors stay with the workers' own memory devices, for links cannot be measured: %s", error
        )
        return None


def _leads_elsewhere(client: TrialClient, routes: Sequence[RoutingTable]) -> bool:
    return any(
        device != client.table.local_device(worker)
        for worker, table in enumerate(routes)
        for device in (table.lat_proxy, table.bw_proxy)
    )


def _slowest_seconds(
    client: TrialClient,
    trials: Sequence[tuple[Way, tuple[RoutingTable, ...]]],
    gpu: str,
    shard_bytes: int,
) -> list[float]:
    """The time of the slowest worker by each way along some routes, from shards of at least `shard_bytes`."""
    seconds = np.array([_least_seconds(client, way, gpu, routes, shard_bytes) for way, routes in trials])
    client.all_reduce(seconds.ctypes.data, len(seconds), "float64", "max")
    return [float(each) for each in seconds]


def _least_seconds(
    client: TrialClient, way: Way, gpu: str, routes: tuple[RoutingTable, ...], shard_bytes: int
) -> float:
    try:
        group = client.register_trial(
            f"trial of {way}", _TRIAL, way.algorithm, gpu, routes, shard_bytes=shard_bytes
        )
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

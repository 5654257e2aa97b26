"""From traffic to time: each GPU's part of a kernel is a flow through the resources that it needs.

Flows share SMs, banks, DRAM and links max-min fairly (`coarse.simulator.events.engine`); a kernel ends with its last
flow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coarse.simulator.events.engine import simulate
from coarse.simulator.events.tasks import Task
from coarse.simulator.studies.remote_data_cache.accesses.placement import Placement
from coarse.simulator.studies.remote_data_cache.accesses.streams import Stream
from coarse.simulator.studies.remote_data_cache.caches.last_level_cache import CacheOutcome
from coarse.simulator.studies.remote_data_cache.caches.remote_cache import RemoteOutcome
from coarse.simulator.studies.remote_data_cache.parameters import LINE_BYTES, Machine

Amounts = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The resources that each GPU's part of each kernel needs.

    Args:
        accesses, wait_cycles: By kernel and GPU: accesses, and cycles that their latencies add up to.
        memory, sent, received: Bytes by kernel, GPU that runs it, and GPU whose DRAM or link they cross.
    """

    accesses: Amounts
    wait_cycles: Amounts
    memory: Amounts
    sent: Amounts
    received: Amounts


def traffic_of(
    stream: Stream, placement: Placement, cache: CacheOutcome, remote: RemoteOutcome, machine: Machine
) -> Traffic:
    """Adds up messages and DRAM accesses of a stream."""
    return _Sums(stream, placement, machine).of(cache, remote)


class _Sums:
    def __init__(self, stream: Stream, placement: Placement, machine: Machine) -> None:
        self._stream, self._placement, self._machine = stream, placement, machine
        shape = (stream.num_kernels, stream.num_gpus)
        self._wait = np.zeros(shape)
        self._part = stream.kernel * stream.num_gpus + stream.gpu
        self._memory, self._sent, self._received = (np.zeros((*shape, stream.num_gpus)) for _ in range(3))

    def of(self, cache: CacheOutcome, remote: RemoteOutcome) -> Traffic:
        self._read(cache, remote)
        self._write(cache, remote)
        self._copy_pages()
        return Traffic(
            accesses=self._count(np.ones(len(self._part), dtype=bool)),
            wait_cycles=self._wait,
            memory=self._memory,
            sent=self._sent,
            received=self._received,
        )

    def _read(self, cache: CacheOutcome, remote: RemoteOutcome) -> None:
        own, home, machine = self._stream.gpu, self._placement.home, self._machine
        is_read = ~self._stream.is_write
        is_miss = is_read & ~cache.is_hit
        is_fetch = is_miss & self._placement.is_remote & ~remote.is_hit
        is_looked_up = remote.is_probe & is_fetch
        self._access_memory(is_miss & ~is_fetch, own)
        self._access_memory(is_fetch, home)
        self._access_memory(is_looked_up, own)
        self._message(is_fetch, own, home, machine.header_bytes)
        self._message(is_fetch, home, own, machine.header_bytes + LINE_BYTES)
        self._wait_for(is_read, machine.cache_cycles)
        self._wait_for(is_miss, machine.memory_cycles)
        self._wait_for(is_fetch, machine.link_cycles)
        self._wait_for(is_looked_up, machine.memory_cycles)

    def _write(self, cache: CacheOutcome, remote: RemoteOutcome) -> None:
        own, home = self._stream.gpu, self._placement.home
        self._access_memory(remote.is_install, own)
        self._access_memory(remote.is_sent, home)
        self._message(remote.is_sent, own, home, self._machine.header_bytes + LINE_BYTES)
        self._invalidate(remote.is_broadcast)
        self._write_back(cache.written_back)

    def _count(self, chosen: NDArray[np.bool_]) -> Amounts:
        return self._by(self._part[chosen], 1)

    def _by(self, key: NDArray[np.int64], depth: int) -> Amounts:
        num = self._stream.num_gpus
        shape = (self._stream.num_kernels, *[num] * depth)
        return np.bincount(key, minlength=int(np.prod(shape))).reshape(shape).astype(float)

    def _towards(self, chosen: NDArray[np.bool_], node: NDArray[np.int64]) -> Amounts:
        """Number of chosen accesses by kernel, GPU and another GPU."""
        return self._by(self._part[chosen] * self._stream.num_gpus + node[chosen], 2)

    def _access_memory(self, chosen: NDArray[np.bool_], node: NDArray[np.int64]) -> None:
        self._memory += LINE_BYTES * self._towards(chosen, node)

    def _message(
        self, chosen: NDArray[np.bool_], source: NDArray[np.int64], target: NDArray[np.int64], num_bytes: int
    ) -> None:
        self._sent += num_bytes * self._towards(chosen, source)
        self._received += num_bytes * self._towards(chosen, target)

    def _invalidate(self, is_broadcast: NDArray[np.bool_]) -> None:
        """The home tells all but itself and the writer, and each answers."""
        stream, home, header = self._stream, self._placement.home, self._machine.header_bytes
        for node in range(stream.num_gpus if is_broadcast.any() else 0):
            target = np.full(len(home), node)
            told = is_broadcast & (home != node) & (stream.gpu != node)
            self._message(told, home, target, header)
            self._message(told, target, home, header)
            self._memory += self._machine.probe_bytes * self._towards(told, target)

    def _write_back(self, written_back: NDArray[np.int64]) -> None:
        gpus = np.arange(self._stream.num_gpus)
        self._memory[:, gpus, gpus] += LINE_BYTES * written_back

    def _copy_pages(self) -> None:
        num = self._stream.num_gpus
        num_bytes = self._placement.copied_pages * (self._machine.page_lines * LINE_BYTES)
        gpus = np.arange(num)
        self._memory[:, gpus, gpus] += num_bytes
        self._received[:, gpus, gpus] += num_bytes
        if num > 1:  # other GPUs send equal parts
            self._sent += np.where(gpus[:, None] == gpus, 0, num_bytes[:, :, None] / (num - 1))

    def _wait_for(self, chosen: NDArray[np.bool_], cycles: float) -> None:
        self._wait += cycles * self._count(chosen)


def kernel_seconds(
    traffic: Traffic, machine: Machine, *, instructions: float, outstanding_lines: int
) -> Amounts:
    """Seconds of each kernel, without its serial part.

    Args:
        traffic: Its needs.
        machine: Rates of the resources.
        instructions: Warp instructions per access.
        outstanding_lines: Lines that an SM waits for at once.
    """
    num_gpus = traffic.accesses.shape[1]
    capacities = _capacities(machine, num_gpus, outstanding_lines)
    return np.array(
        [
            simulate(
                [
                    task
                    for gpu in range(num_gpus)
                    if (task := _task(traffic, kernel, gpu, instructions)).nbytes
                ],
                capacities,
            ).end_s
            for kernel in range(len(traffic.accesses))
        ]
    )


def _capacities(machine: Machine, num_gpus: int, outstanding_lines: int) -> dict[str, float]:
    per_gpu = {
        "sms": machine.num_sms * machine.clock_hz,
        "banks": machine.cache_banks * machine.clock_hz,
        "waits": machine.num_sms * outstanding_lines * machine.clock_hz,
        "memory": machine.memory_bytes_per_s,
        "sent": machine.link_bytes_per_s,
        "received": machine.link_bytes_per_s,
    }
    return {f"{name} {gpu}": rate for name, rate in per_gpu.items() for gpu in range(num_gpus)}


def _task(traffic: Traffic, kernel: int, gpu: int, instructions: float) -> Task:
    """Its bytes are accesses; each crosses the resources with its share of the flow's amounts."""
    accesses = traffic.accesses[kernel, gpu]
    usage = [(f"sms {gpu}", instructions), (f"banks {gpu}", 1.0)]
    if accesses:
        usage.append((f"waits {gpu}", traffic.wait_cycles[kernel, gpu] / accesses))
        for name, amounts in (
            ("memory", traffic.memory),
            ("sent", traffic.sent),
            ("received", traffic.received),
        ):
            usage += [
                (f"{name} {node}", amount / accesses)
                for node, amount in enumerate(amounts[kernel, gpu].tolist())
                if amount
            ]
    return Task(name=f"gpu {gpu}", nbytes=accesses, usage=tuple(usage))

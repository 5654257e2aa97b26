"""Writes from GPU to GPU: direct, staged in host memory at the source, and hybrid (chapters 3 and 4).

The network interface reads a GPU's memory by non-posted PCIe requests, which these machines serve slowly, and writes
it by posted ones. A staged write copies a chunk to host memory first; each finished chunk is a write of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from coarse.simulator.events.engine import simulate
from coarse.simulator.events.fair_sharing import Usage
from coarse.simulator.events.tasks import Task
from coarse.simulator.studies.distributed_gpus.machines import (
    PEER_WRITE_MBYTES_PER_S,
    PUT_US,
    STAGING_US,
    Machine,
)

US = 1e-6
MB = 1e6
KIB = 1 << 10
CHUNK_BYTES = 256 * KIB
_LARGEST_SWITCH = 1 << 24


class Memory(Enum):
    """Where one end of a transfer lies."""

    HOST = "host"
    GPU = "GPU"


def capacities(machine: Machine) -> dict[str, float]:
    """Bytes per second of each part that a transfer may cross."""
    return {
        "link": machine.link.value * MB,
        "PCIe reads": machine.peer_read.value * MB,
        "PCIe writes": PEER_WRITE_MBYTES_PER_S.value * MB,
        "copy engine": machine.copy.value * MB,
    }


def path(source: Memory, target: Memory) -> Usage:
    """The parts that a direct transfer crosses."""
    buckets = ["link"]
    if source is Memory.GPU:
        buckets.append("PCIe reads")
    if target is Memory.GPU:
        buckets.append("PCIe writes")
    return tuple((bucket, 1.0) for bucket in buckets)


def bandwidth_mbytes_per_s(
    machine: Machine, source: Memory, target: Memory, *, nbytes: int = 1 << 26
) -> float:
    """Of a transfer so large that its latency does not count."""
    task = Task(name="transfer", nbytes=nbytes, usage=path(source, target))
    return nbytes / MB / simulate([task], capacities(machine)).end_s


def direct_us(machine: Machine, nbytes: float) -> float:
    """A write from GPU to GPU by GPUDirect RDMA."""
    usage = path(Memory.GPU, Memory.GPU)
    task = Task(name="write", nbytes=nbytes, usage=usage, latency_s=PUT_US.value * US)
    return simulate([task], capacities(machine)).end_s / US


def staged_us(machine: Machine, nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> float:
    """A write staged at the source, a chunk after the other: copy and network overlap."""
    return simulate(staged_tasks("", nbytes, chunk_bytes), capacities(machine)).end_s / US


def staged_tasks(name: str, nbytes: int, chunk_bytes: int) -> list[Task]:
    """Each chunk's copy on the copy engine, and its write on the link."""
    tasks: list[Task] = []
    for number, begin in enumerate(range(0, nbytes, chunk_bytes)):
        size = min(chunk_bytes, nbytes - begin)
        copy = Task(
            name=f"{name}copy {number}",
            queue=f"{name}copy engine",
            order=number,
            overhead_s=STAGING_US.value * US,
            nbytes=size,
            usage=(("copy engine", 1.0),),
        )
        write = Task(
            name=f"{name}write {number}",
            after=(copy.name,),
            queue=f"{name}send queue",
            order=number,
            nbytes=size,
            usage=path(Memory.HOST, Memory.GPU),
            latency_s=PUT_US.value * US,
        )
        tasks += [copy, write]
    return tasks


def hybrid_us(machine: Machine, nbytes: int, *, switch_bytes: float) -> float:
    """`gaspi_gpu_write`: direct up to a size, staged above it."""
    return direct_us(machine, nbytes) if nbytes <= switch_bytes else staged_us(machine, nbytes)


def all_to_all_us(machine: Machine, *, gpus: int, nbytes: int, is_staged: bool) -> float:
    """Every GPU writes `nbytes` to every other one, each GPU with a network interface of its own."""
    tasks: list[Task] = []
    for source in range(gpus):
        for distance in range(1, gpus):
            target = (source + distance) % gpus
            tasks += _exchange_tasks(source, target, distance, nbytes, is_staged=is_staged)
    kinds = capacities(machine) | {"link in": machine.link.value * MB}
    return (
        simulate(tasks, {f"{kind} {gpu}": rate for kind, rate in kinds.items() for gpu in range(gpus)}).end_s
        / US
    )


def _exchange_tasks(source: int, target: int, order: int, nbytes: int, *, is_staged: bool) -> list[Task]:
    buckets = [f"link {source}", f"link in {target}", f"PCIe writes {target}"]
    copy = Task(
        name=f"copy {source}.{target}",
        queue=f"copy engine {source}",
        order=order,
        overhead_s=STAGING_US.value * US,
        nbytes=nbytes,
        usage=((f"copy engine {source}", 1.0),),
    )
    write = Task(
        name=f"write {source}.{target}",
        after=(copy.name,) if is_staged else (),
        queue=f"send queue {source}",
        order=order,
        nbytes=nbytes,
        usage=tuple(
            (bucket, 1.0) for bucket in (buckets if is_staged else [*buckets, f"PCIe reads {source}"])
        ),
        latency_s=PUT_US.value * US,
    )
    return [copy, write] if is_staged else [write]


def switch_bytes(machine: Machine) -> int:
    """The largest size, in bytes, up to which a direct write is the faster one."""
    return _largest(lambda nbytes: direct_us(machine, nbytes) <= staged_us(machine, nbytes))


def all_to_all_switch_bytes(machine: Machine, gpus: int) -> int:
    """The same for the messages of an all-to-all."""
    return _largest(
        lambda nbytes: (
            all_to_all_us(machine, gpus=gpus, nbytes=nbytes, is_staged=False)
            <= all_to_all_us(machine, gpus=gpus, nbytes=nbytes, is_staged=True)
        )
    )


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest number for which a condition holds that holds for 1 and for all smaller ones."""
    below, above = 1, _LARGEST_SWITCH
    while above - below > 1:
        middle = (below + above) // 2
        if holds(middle):
            below = middle
        else:
            above = middle
    return below


def best_chunk_bytes(machine: Machine, nbytes: int) -> int:
    """The chunk, a power of two from 4 KiB on, with which a staged write is fastest."""
    chunks = [1 << power for power in range(12, nbytes.bit_length())]
    return min(chunks, key=lambda chunk: staged_us(machine, nbytes, chunk))

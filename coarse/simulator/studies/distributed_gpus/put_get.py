"""Puts that a GPU posts itself: who waits for what (chapter 5).

A GPU thread writes a work request (post), the network interface sends, and the thread reads the completion (poll).
The target polls the last byte in its memory. Posting and polling hold the thread; accesses to queues in host memory
also hold the PCIe bus, which all connections share.
"""

from __future__ import annotations

from typing import NamedTuple

from coarse.simulator.events.engine import simulate
from coarse.simulator.events.tasks import Task
from coarse.simulator.studies.distributed_gpus.machines import (
    GPU_MBYTES_PER_S,
    GPU_QUEUE_PCIE_ACCESSES,
    HOST_QUEUE_POLL_US,
    HOST_QUEUE_POST_US,
    PCIE_ACCESS_US,
    PCIE_ACCESSES,
    PCIE_READ_US,
    POLL_US,
    POST_US,
    PUT_US,
    RMA_FLAG_US,
    RMA_PUT_US,
    RMA_READS,
)
from coarse.simulator.studies.distributed_gpus.transfers import MB, US


class Control(NamedTuple):
    """How a GPU controls the interface: time of post and poll, and PCIe accesses of a post."""

    name: str
    post_us: float
    poll_us: float
    pcie_accesses: float


GPU_QUEUES = Control("queues on the GPU", POST_US.value, POLL_US.value, GPU_QUEUE_PCIE_ACCESSES.value)
HOST_QUEUES = Control(
    "queues on the host", HOST_QUEUE_POST_US.value, HOST_QUEUE_POLL_US.value, PCIE_ACCESSES.value
)

_DESCRIPTOR_STORES = 3  # 24 bytes, 8 at a time
_ROUNDS = 20
_MESSAGES = 40
_PEAK = 0.99
_SIZES = tuple(1 << power for power in range(8, 21))


def half_round_us(control: Control) -> float:
    """Ping-pong of small puts: each side polls its completion while the answer is on its way."""
    tasks: list[Task] = []
    arrived = ""
    for half in range(2 * _ROUNDS):
        gpu = f"GPU {half % 2}"
        post = Task(
            name=f"post {half}",
            after=(arrived,) if arrived else (),
            queue=gpu,
            order=half,
            overhead_s=control.post_us * US,
        )
        flight = Task(name=f"flight {half}", after=(post.name,), latency_s=PUT_US.value * US)
        poll = Task(
            name=f"poll {half}", after=(post.name,), queue=gpu, order=half, overhead_s=control.poll_us * US
        )
        tasks += [post, flight, poll]
        arrived = flight.name
    end_s = simulate(tasks, {}).times[arrived].finished_s
    return end_s / (2 * _ROUNDS) / US


def message_rate_per_s(control: Control, connections: int) -> float:
    """Small puts of one thread-block per connection: posts in parallel, PCIe accesses one after the other."""
    bus_us = control.pcie_accesses * PCIE_ACCESS_US.value
    tasks: list[Task] = []
    for connection in range(connections):
        for number in range(_MESSAGES):
            work = Task(
                name=f"work {connection}.{number}",
                after=(f"access {connection}.{number - 1}",) if number else (),
                overhead_s=(control.post_us - bus_us) * US,
            )
            access = Task(
                name=f"access {connection}.{number}",
                after=(work.name,),
                queue="PCIe",
                overhead_s=bus_us * US,
            )
            tasks += [work, access]
    return connections * _MESSAGES / simulate(tasks, {}).end_s


def stream_mbytes_per_s(control: Control, nbytes: int) -> float:
    """Puts of `nbytes` one after the other by one thread, which posts and polls each; the link overlaps with both."""
    rate = GPU_MBYTES_PER_S.value * MB
    tasks: list[Task] = []
    for number in range(_MESSAGES):
        thread = Task(
            name=f"thread {number}",
            queue="GPU",
            order=number,
            overhead_s=(control.post_us + control.poll_us) * US,
        )
        flow = Task(
            name=f"flow {number}",
            after=(thread.name,),
            queue="link",
            order=number,
            nbytes=nbytes,
            usage=(("link", 1.0),),
        )
        tasks += [thread, flow]
    times = simulate(tasks, {"link": rate}).times
    first, last = times["flow 0"].last_byte_s, times[f"flow {_MESSAGES - 1}"].last_byte_s
    return (_MESSAGES - 1) * nbytes / MB / (last - first)


def size_of_peak(control: Control) -> int:
    """The smallest power of two whose stream reaches the peak bandwidth."""
    return next(
        nbytes for nbytes in _SIZES if stream_mbytes_per_s(control, nbytes) >= _PEAK * GPU_MBYTES_PER_S.value
    )


def host_assisted_us(put_us: float) -> float:
    """Half a round if the GPU sets a flag in host memory, and the host puts."""
    flag = Task(name="flag", latency_s=RMA_FLAG_US.value * US)
    put = Task(name="put", after=("flag",), latency_s=put_us * US)
    return simulate([flag, put], {}).end_s / US


def rma_half_round_us(*, has_notifications: bool) -> float:
    """Half a round of Extoll puts by a GPU: a descriptor's stores, and with notifications a round's reads, halved."""
    stores = Task(name="stores", queue="PCIe", overhead_s=_DESCRIPTOR_STORES * PCIE_ACCESS_US.value * US)
    put = Task(name="put", after=("stores",), latency_s=RMA_PUT_US.value * US)
    num_reads = RMA_READS.value / 2 if has_notifications else 0.0
    reads = Task(name="reads", after=("put",), queue="PCIe", overhead_s=num_reads * PCIE_READ_US.value * US)
    return simulate([stores, put, reads], {}).end_s / US

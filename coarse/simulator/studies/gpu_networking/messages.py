"""One message between two nodes, as tasks on the processors, network interfaces and links that it occupies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coarse.simulator.events.engine import simulate
from coarse.simulator.events.tasks import Task
from coarse.simulator.studies.gpu_networking.stages import (
    HOST_PUT_US,
    LINK_GBYTES_PER_S,
    NETWORK_US,
    NIC_INITIATOR_US,
    NIC_TARGET_US,
    SLIDE_16,
    SLIDE_59,
    ActiveMessage,
)

US = 1e-6
_BYTES_PER_S = 1e9
_SMALL = 64


class Hop(NamedTuple):
    """A stage: the queue that it occupies, "" for none, and how long."""

    queue: str
    us: float


def chain(name: str, hops: Sequence[Hop], after: tuple[str, ...] = ()) -> list[Task]:
    """Tasks that follow each other, each in its queue."""
    tasks: list[Task] = []
    for number, hop in enumerate(hops):
        awaited = (tasks[-1].name,) if tasks else after
        tasks.append(Task(name=f"{name}.{number}", after=awaited, queue=hop.queue, overhead_s=hop.us * US))
    return tasks


_QUEUES = (
    "initiator CPU",
    "initiator NIC",
    "link",
    "target NIC",
    "target front end",
    "target GPU",
    "target memory",
)


def active_message_tasks(name: str, stages: ActiveMessage, after: tuple[str, ...] = ()) -> list[Task]:
    """Slide 16's message, each stage on the part that performs it."""
    return chain(name, [Hop(queue, us) for queue, us in zip(_QUEUES, stages, strict=True)], after)


def active_message_us(stages: ActiveMessage) -> float:
    """Latency of one message alone."""
    return simulate(active_message_tasks("message", stages), {}).end_s / US


def grown(small: ActiveMessage, *, nbytes: int, kernel_us_per_byte: float) -> ActiveMessage:
    """A message of `nbytes` bytes, from the stages of one of 64: link and kernel take the rest of the bytes' time."""
    more = nbytes - _SMALL
    return small._replace(
        network=small.network + more / (LINK_GBYTES_PER_S.value * _BYTES_PER_S) / US,
        kernel=small.kernel + more * kernel_us_per_byte,
    )


def kernel_us_per_byte() -> float:
    """Fitted to XTQ's kernel on slide 16, 64 B and 4 KB."""
    small, large = (SLIDE_16[nbytes]["XTQ"].kernel for nbytes in (64, 4096))
    return (large - small) / (4096 - _SMALL)


def data_path_us(stages: ActiveMessage) -> float:
    """The two network interfaces and the network between them."""
    return stages.initiator + stages.network + stages.target


DELIVERY = (
    Hop("initiator NIC", NIC_INITIATOR_US.value),
    Hop("link", NETWORK_US.value),
    Hop("target NIC", NIC_TARGET_US.value),
)
"""From the interface's start of a small put to its arrival, with the stages of slide 16."""


class PutTimes(NamedTuple):
    """Slide 59's benchmark: when the initiator's kernel and put are done, and when the target has the data."""

    initiator_us: float
    target_us: float


def one_sided_put(scheme: str) -> PutTimes:
    """Launches a kernel which ends, and a put: after the kernel under HDN and GDS, from within it under GPU-TN."""
    stages = SLIDE_59[scheme]
    kernel = chain("kernel", [Hop("GPU", us) for us in (stages.launch, stages.execution, stages.teardown)])
    executed, ended = kernel[1].name, kernel[2].name
    if scheme == "GPU-TN":
        put: list[Task] = []
        delivery = chain("delivery", DELIVERY, (executed,))
    else:
        put = chain("put", [Hop("CPU" if scheme == "HDN" else "GPU", stages.put)], (ended,))
        delivery = chain("delivery", DELIVERY, (put[-1].name,))
    times = simulate([*kernel, *put, *delivery], {}).times
    initiator_s = max(times[task.name].finished_s for task in (*kernel, *put))
    return PutTimes(initiator_s / US, times[delivery[-1].name].finished_s / US)


def service_us(*, work_groups: int, threads: int, rounds: int = 2) -> float:
    """Mean time until host threads have put a work-group's message, while all work-groups send again and again."""
    tasks = [
        Task(
            name=f"{work_group}.{number}",
            after=(f"{work_group}.{number - 1}",) if number else (),
            queue="host threads",
            overhead_s=HOST_PUT_US.value * US,
        )
        for work_group in range(work_groups)
        for number in range(rounds)
    ]
    times = simulate(tasks, {}, channels={"host threads": threads}).times
    last = [times[f"{work_group}.{rounds - 1}"] for work_group in range(work_groups)]
    return sum(each.finished_s - each.ready_s for each in last) / work_groups / US


def ring_of_active_messages_us(stages: ActiveMessage, *, nodes: int) -> float:
    """A ring all-reduce whose N-1 reductions are active messages, and whose N-1 gathering messages are plain puts."""
    tasks: list[Task] = []
    for step in range(2 * (nodes - 1)):
        after = (tasks[-1].name,) if tasks else ()
        message = active_message_tasks(str(step), stages, after)
        tasks += message if step < nodes - 1 else message[:4]
    return simulate(tasks, {}).end_s / US

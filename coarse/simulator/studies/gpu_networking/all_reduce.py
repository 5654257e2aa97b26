"""A ring all-reduce under each control path, on equal nodes and links.

Each node sends a chunk to its neighbour, which adds it to its own and passes it on. N-1 iterations reduce,
N-1 gather.
All nodes do the same at the same time, so one stands for all: its messages arrive at itself.

Kernels that end before a message starts send whole chunks. Kernels that stay send each work-group's piece as soon as
it is reduced, so reduction and transfer overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from coarse.simulator.events.engine import simulate
from coarse.simulator.events.tasks import Task
from coarse.simulator.studies.gpu_networking.control_paths import ControlPath
from coarse.simulator.studies.gpu_networking.messages import DELIVERY, US, chain
from coarse.simulator.studies.gpu_networking.stages import LINK_GBYTES_PER_S, MEMORY_GBYTES_PER_S
from coarse.simulator.studies.gpu_networking.triggers import TriggerList

_BYTES_PER_S = 1e9
_CAPACITIES = {
    "link": LINK_GBYTES_PER_S.value * _BYTES_PER_S,
    "memory": MEMORY_GBYTES_PER_S.value * _BYTES_PER_S,
}
_SENT = (("link", 1.0), ("memory", 2.0))  # read here, written there
_REDUCED = (("memory", 3.0),)  # two operands, one result


def all_reduce_us(path: ControlPath, *, nodes: int, nbytes: float) -> float:
    """Time of an all-reduce of `nbytes` bytes on each of `nodes` nodes.

    Raises:
        ValueError: If there are less than two nodes.
    """
    if nodes < 2:
        raise ValueError(f"a ring of {nodes} nodes sends nothing; it takes at least 2")
    tasks = _tasks(path, nodes, nbytes)
    return simulate(tasks, _CAPACITIES, channels=dict(path.channels)).end_s / US


def _tasks(path: ControlPath, nodes: int, nbytes: float) -> list[Task]:
    piece_bytes = nbytes / nodes / path.pieces
    tasks = chain("begin", path.at_begin)
    arrived = [(tasks[-1].name,) if tasks else ()] * path.pieces
    for step in range(2 * (nodes - 1)):
        is_reduced = 0 < step < nodes
        ready = []
        for piece, after in enumerate(arrived):
            name = f"{step}.{piece}"
            more = _until_ready(path, name, after, is_reduced=is_reduced, nbytes=piece_bytes)
            tasks += more
            ready.append((more[-1].name,) if more else after)
        arrived = []
        for number, triggers in enumerate(_fired(path, step, ready)):
            message = _message(f"{step}.message{number}", triggers, step, piece_bytes * path.threshold)
            tasks += message
            arrived += [(message[-1].name,)] * path.threshold
    last = tuple(sorted({name for names in arrived for name in names}))
    return [*tasks, *chain("end", path.at_end, last)]


def _until_ready(
    path: ControlPath, name: str, after: tuple[str, ...], *, is_reduced: bool, nbytes: float
) -> list[Task]:
    """From a piece's arrival to the trigger of its next message."""
    if not is_reduced:
        return chain(f"{name}.forward", path.to_forward, after)
    before = chain(f"{name}.before", path.before_reduction, after)
    reduction = Task(
        name=f"{name}.reduction",
        after=(before[-1].name,) if before else after,
        queue="compute units",
        nbytes=nbytes,
        usage=_REDUCED,
    )
    return [*before, reduction, *chain(f"{name}.after", path.after_reduction, (reduction.name,))]


def _fired(path: ControlPath, step: int, ready: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The triggers that each message of an iteration waits for, as the interface's trigger list counts them."""
    interface = TriggerList()
    counted: list[list[str]] = []
    for number in range(len(ready) // path.threshold):
        interface.register(f"{step}.{number}", tag=number, threshold=path.threshold)
        counted.append([])
    for piece, names in enumerate(ready):
        counted[piece // path.threshold] += names
        interface.trigger(piece // path.threshold)
    assert interface.fired == [f"{step}.{number}" for number in range(len(counted))]
    return [tuple(names) for names in counted]


def _message(name: str, after: tuple[str, ...], step: int, nbytes: float) -> list[Task]:
    initiator, network, target = DELIVERY
    post = Task(name=f"{name}.post", after=after, queue="NIC", order=step, overhead_s=initiator.us * US)
    flow = Task(
        name=f"{name}.flow",
        after=(post.name,),
        queue="wire",
        order=step,
        nbytes=nbytes,
        usage=_SENT,
        latency_s=(network.us + target.us) * US,
    )
    return [post, flow]

"""A ring all-reduce under each control path, on equal nodes and links.

Each node sends a chunk to its neighbour, which adds it to its own and passes it on. N-1 iterations reduce,
N-1 gather.
All nodes do the same at the same time, so one stands for all: what it sends arrives at itself.

Kernels that end before a message starts send whole chunks. Kernels that stay send each work-group's piece as soon as
it is reduced, so reduction and transfer overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coarse.simulator.engine import simulate
from coarse.simulator.studies.gpu_networking.messages import DELIVERY, US, Hop, chain
from coarse.simulator.studies.gpu_networking.stages import (
    CACHE_US,
    COUNTER_US,
    CP_PUT_US,
    CP_THREADS,
    EXECUTION_US,
    HAND_OVER_US,
    HOST_PUT_US,
    HOST_THREADS,
    LAUNCH_US,
    LINK_GBYTES_PER_S,
    MEMORY_GBYTES_PER_S,
    PCIE_US,
    PIECES,
    REGISTERED_PUT_US,
    TEARDOWN_US,
    TRIGGER_US,
    XTQ_LAUNCH_SAVING_US,
    XTQ_NIC_US,
)
from coarse.simulator.studies.gpu_networking.triggers import TriggerList
from coarse.simulator.tasks import Task

_GPU, _CPU, _FRONT_END = "GPU", "CPU", "front end"
_BYTES_PER_S = 1e9
_CAPACITIES = {
    "link": LINK_GBYTES_PER_S.value * _BYTES_PER_S,
    "memory": MEMORY_GBYTES_PER_S.value * _BYTES_PER_S,
}
_SENT = (("link", 1.0), ("memory", 2.0))  # read here, written there
_REDUCED = (("memory", 3.0),)  # two operands, one result


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPath:
    """Who prepares, triggers and completes a message, and the time of each.

    Args:
        name: As in the document.
        prepares, triggers, completes: In words, for the table.
        at_begin: Once, before the first message.
        before_reduction: From a chunk's arrival to the start of its reduction.
        after_reduction: From its end to the interface's start of the next message.
        to_forward: The same from arrival, where nothing is reduced.
        at_end: Once, after the last arrival.
        pieces: Messages of a chunk, or triggers of a message that takes several.
        threshold: Triggers that one message takes.
        channels: Tasks that a queue serves at once.
    """

    name: str
    prepares: str
    triggers: str
    completes: str
    at_begin: tuple[Hop, ...] = ()
    before_reduction: tuple[Hop, ...] = ()
    after_reduction: tuple[Hop, ...] = ()
    to_forward: tuple[Hop, ...] = ()
    at_end: tuple[Hop, ...] = ()
    pieces: int = 1
    threshold: int = 1
    channels: tuple[tuple[str, int], ...] = ()


_LAUNCH, _TEARDOWN = Hop(_FRONT_END, LAUNCH_US.value), Hop(_FRONT_END, TEARDOWN_US.value)
_HOST_PUT, _SERVED_BY_HOST = Hop(_CPU, HOST_PUT_US.value), Hop("host threads", HOST_PUT_US.value)
_HOST_CHANNELS = (("host threads", round(HOST_THREADS.value)),)
_CP_CHANNELS = (("command processors", round(CP_THREADS.value)),)
_NUM_PIECES = round(PIECES.value)
_GPU_POLLS = "the kernel polls its memory"


def _kernel_boundary(who: Mapping[str, str], launch: Hop, put: Hop, nic: tuple[Hop, ...] = ()) -> ControlPath:
    """A kernel for each reduction, and messages between kernels."""
    return ControlPath(
        name=who["name"],
        prepares=who["prepares"],
        triggers=who["triggers"],
        completes=who["completes"],
        before_reduction=(*nic, launch, Hop(_GPU, EXECUTION_US.value)),
        after_reduction=(_TEARDOWN, put),
        to_forward=(*nic, put),
    )


def _intra_kernel(
    who: Mapping[str, str],
    request: tuple[Hop, ...],
    channels: tuple[tuple[str, int], ...] = (),
    threshold: int = 1,
) -> ControlPath:
    """One kernel for the whole all-reduce, whose work-groups send."""
    return ControlPath(
        name=who["name"],
        prepares=who["prepares"],
        triggers=who["triggers"],
        completes=_GPU_POLLS,
        at_begin=(_LAUNCH,),
        after_reduction=request,
        to_forward=request,
        at_end=(_TEARDOWN,),
        pieces=_NUM_PIECES,
        threshold=threshold,
        channels=channels,
    )


def _coarse(who: Mapping[str, str], first: Hop) -> ControlPath:
    """A client hands its tensor over once; from then on the ring's iterations wait for counters."""
    counter = (Hop("", COUNTER_US.value),)
    return ControlPath(
        name=who["name"],
        prepares="client, at registration",
        triggers=who["triggers"],
        completes="counters of the ring, then the client's flag",
        at_begin=(first,),
        after_reduction=counter,
        to_forward=counter,
        at_end=counter,
        pieces=_NUM_PIECES,
    )


HDN = _kernel_boundary(
    {
        "name": "HDN",
        "prepares": "CPU",
        "triggers": "CPU, after the kernel",
        "completes": "CPU polls, launches the next kernel",
    },
    _LAUNCH,
    _HOST_PUT,
)
GDS = _kernel_boundary(
    {
        "name": "GDS",
        "prepares": "CPU, before",
        "triggers": "GPU's front end, after the kernel",
        "completes": "front end waits, then launches",
    },
    _LAUNCH,
    Hop(_FRONT_END, REGISTERED_PUT_US.value),
)
XTQ = _kernel_boundary(
    {
        "name": "XTQ",
        "prepares": "CPU, with indices of the target's queue and kernel",
        "triggers": "CPU, after the kernel",
        "completes": "the target's NIC queues the kernel",
    },
    Hop(_FRONT_END, LAUNCH_US.value - XTQ_LAUNCH_SAVING_US.value),
    _HOST_PUT,
    (Hop("NIC control", XTQ_NIC_US.value),),
)
GHN = _intra_kernel(
    {"name": "GHN", "prepares": "host thread", "triggers": "work-group, by a queue in host memory"},
    (Hop("", PCIE_US.value), _SERVED_BY_HOST),
    _HOST_CHANNELS,
)
APU = _intra_kernel(
    {"name": "GHN on an APU", "prepares": "host thread", "triggers": "work-group, by a coherent queue"},
    (Hop("", CACHE_US.value), _SERVED_BY_HOST),
    _HOST_CHANNELS,
)
COMP_NET = _intra_kernel(
    {"name": "ComP-Net", "prepares": "command processor", "triggers": "work-group, by a ring in L2"},
    (Hop("", CACHE_US.value), Hop("command processors", CP_PUT_US.value)),
    _CP_CHANNELS,
)
GPU_TN = _intra_kernel(
    {"name": "GPU-TN", "prepares": "CPU, before", "triggers": "work-group, by a store to the NIC"},
    (Hop("", TRIGGER_US.value),),
)
GPU_TN_PER_KERNEL = _intra_kernel(
    {
        "name": "GPU-TN, one message per chunk",
        "prepares": "CPU, before",
        "triggers": "the last work-group's store, which reaches the threshold",
    },
    (Hop("", TRIGGER_US.value),),
    threshold=_NUM_PIECES,
)
COARSE = _coarse(
    {"name": "COARSE, descriptor", "triggers": "client, by a descriptor to a sync core"},
    Hop("", HAND_OVER_US.value),
)
COARSE_TRIGGER = _coarse(
    {"name": "COARSE, trigger instead", "triggers": "client, by the shard's counter"},
    Hop("", COUNTER_US.value),
)

SIX = (HDN, GDS, XTQ, GHN, COMP_NET, GPU_TN)
PATHS = (*SIX, APU, GPU_TN_PER_KERNEL, COARSE, COARSE_TRIGGER)


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

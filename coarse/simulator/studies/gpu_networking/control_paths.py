"""The control paths of a message: who prepares, triggers and completes it, and how long each takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from coarse.simulator.studies.gpu_networking.messages import Hop
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
    PCIE_US,
    PIECES,
    REGISTERED_PUT_US,
    TEARDOWN_US,
    TRIGGER_US,
    XTQ_LAUNCH_SAVING_US,
    XTQ_NIC_US,
)

_GPU, _CPU, _FRONT_END = "GPU", "CPU", "front end"


class Who(NamedTuple):
    """In words, for the table."""

    name: str
    prepares: str
    triggers: str
    completes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPath:
    """Who prepares, triggers and completes a message, and the time of each.

    Args:
        who: Its name as in the document, and who does what.
        at_begin: Once, before the first message.
        before_reduction: From a chunk's arrival to the start of its reduction.
        after_reduction: From its end to the interface's start of the next message.
        to_forward: The same from arrival, where nothing is reduced.
        at_end: Once, after the last arrival.
        pieces: Messages of a chunk, or triggers of a message that takes several.
        threshold: Triggers that one message takes.
        channels: Tasks that a queue serves at once.
    """

    who: Who
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


def _kernel_boundary(who: Who, launch: Hop, put: Hop, nic: tuple[Hop, ...] = ()) -> ControlPath:
    """A kernel for each reduction, and messages between kernels."""
    return ControlPath(
        who=who,
        before_reduction=(*nic, launch, Hop(_GPU, EXECUTION_US.value)),
        after_reduction=(_TEARDOWN, put),
        to_forward=(*nic, put),
    )


def _intra_kernel(
    who: Who,
    request: tuple[Hop, ...],
    channels: tuple[tuple[str, int], ...] = (),
    threshold: int = 1,
) -> ControlPath:
    """One kernel for the whole all-reduce, whose work-groups send."""
    return ControlPath(
        who=who,
        at_begin=(_LAUNCH,),
        after_reduction=request,
        to_forward=request,
        at_end=(_TEARDOWN,),
        pieces=_NUM_PIECES,
        threshold=threshold,
        channels=channels,
    )


def _coarse(name: str, triggers: str, first: Hop) -> ControlPath:
    """A client hands its tensor over once; from then on the ring's iterations wait for counters."""
    counter = (Hop("", COUNTER_US.value),)
    return ControlPath(
        who=Who(name, "client, at registration", triggers, "counters of the ring, then the client's flag"),
        at_begin=(first,),
        after_reduction=counter,
        to_forward=counter,
        at_end=counter,
        pieces=_NUM_PIECES,
    )


HDN = _kernel_boundary(
    Who("HDN", "CPU", "CPU, after the kernel", "CPU polls, launches the next kernel"),
    _LAUNCH,
    _HOST_PUT,
)
GDS = _kernel_boundary(
    Who("GDS", "CPU, before", "GPU's front end, after the kernel", "front end waits, then launches"),
    _LAUNCH,
    Hop(_FRONT_END, REGISTERED_PUT_US.value),
)
XTQ = _kernel_boundary(
    Who(
        "XTQ",
        "CPU, with indices of the target's queue and kernel",
        "CPU, after the kernel",
        "the target's NIC queues the kernel",
    ),
    Hop(_FRONT_END, LAUNCH_US.value - XTQ_LAUNCH_SAVING_US.value),
    _HOST_PUT,
    (Hop("NIC control", XTQ_NIC_US.value),),
)
GHN = _intra_kernel(
    Who("GHN", "host thread", "work-group, by a queue in host memory", _GPU_POLLS),
    (Hop("", PCIE_US.value), _SERVED_BY_HOST),
    _HOST_CHANNELS,
)
APU = _intra_kernel(
    Who("GHN on an APU", "host thread", "work-group, by a coherent queue", _GPU_POLLS),
    (Hop("", CACHE_US.value), _SERVED_BY_HOST),
    _HOST_CHANNELS,
)
COMP_NET = _intra_kernel(
    Who("ComP-Net", "command processor", "work-group, by a ring in L2", _GPU_POLLS),
    (Hop("", CACHE_US.value), Hop("command processors", CP_PUT_US.value)),
    _CP_CHANNELS,
)
GPU_TN = _intra_kernel(
    Who("GPU-TN", "CPU, before", "work-group, by a store to the NIC", _GPU_POLLS),
    (Hop("", TRIGGER_US.value),),
)
GPU_TN_PER_KERNEL = _intra_kernel(
    Who(
        "GPU-TN, one message per chunk",
        "CPU, before",
        "the last work-group's store, which reaches the threshold",
        _GPU_POLLS,
    ),
    (Hop("", TRIGGER_US.value),),
    threshold=_NUM_PIECES,
)
COARSE = _coarse(
    "COARSE, descriptor",
    "client, by a descriptor to a sync core",
    Hop("", HAND_OVER_US.value),
)
COARSE_TRIGGER = _coarse(
    "COARSE, trigger instead",
    "client, by the shard's counter",
    Hop("", COUNTER_US.value),
)

SIX = (HDN, GDS, XTQ, GHN, COMP_NET, GPU_TN)
PATHS = (*SIX, APU, GPU_TN_PER_KERNEL, COARSE, COARSE_TRIGGER)

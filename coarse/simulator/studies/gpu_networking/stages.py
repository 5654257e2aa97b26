"""The stages that the slides time, and the simulation's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from coarse.simulator.studies.sourced import Origin, Parameter


class ActiveMessage(NamedTuple):
    """Slide 16: microseconds from the initiator's put to the target's completion; 0 where there is no such stage."""

    post: float
    initiator: float
    network: float
    target: float
    launch: float
    kernel: float
    completion: float


SCHEMES_OF_SLIDE_16 = ("XTQ", "HSA", "CPU")

SLIDE_16: Mapping[int, Mapping[str, ActiveMessage]] = {
    64: {
        "XTQ": ActiveMessage(0.31, 0.16, 0.31, 0.09, 0.25, 0.23, 0.07),
        "HSA": ActiveMessage(0.31, 0.11, 0.30, 0.06, 0.61, 0.23, 0.08),
        "CPU": ActiveMessage(0.31, 0.11, 0.31, 0.07, 0.0, 0.0, 0.21),
    },
    4096: {
        "XTQ": ActiveMessage(0.31, 0.24, 0.44, 0.15, 0.28, 0.59, 0.06),
        "HSA": ActiveMessage(0.31, 0.22, 0.43, 0.14, 0.66, 0.55, 0.07),
        "CPU": ActiveMessage(0.31, 0.22, 0.42, 0.14, 0.0, 0.0, 0.65),
    },
}
"""By payload in bytes."""


class OneSidedPut(NamedTuple):
    """Slide 59: microseconds of the initiator's stages, and when the target has the data."""

    launch: float
    execution: float
    teardown: float
    put: float
    target_wait: float


SLIDE_59: Mapping[str, OneSidedPut] = {
    "HDN": OneSidedPut(1.51, 0.41, 1.50, 0.30, 4.21),
    "GDS": OneSidedPut(1.50, 0.43, 1.51, 0.05, 3.76),
    "GPU-TN": OneSidedPut(1.50, 0.49, 1.49, 0.0, 2.71),
}

BLOCKED: Mapping[str, float] = {
    "AlexNet": 0.14,
    "AN4 LSTM": 0.50,
    "CIFAR": 0.04,
    "Large Synth": 0.28,
    "MNIST Conv": 0.12,
    "MNIST Hidden": 0.29,
}
"""Slides 17 and 38: share of the time that a workload waits for the network."""

REDUCTIONS: Mapping[str, int] = {
    "AlexNet": 4672,
    "AN4 LSTM": 131192,
    "CIFAR": 939820,
    "Large Synth": 52800,
    "MNIST Conv": 900000,
    "MNIST Hidden": 900000,
}
"""Slides 17 and 38. Their sizes are not printed."""

_ON_16, _ON_59 = SLIDE_16[64], SLIDE_59


def _parameter(what: str, value: float, unit: str, origin: Origin, source: str) -> Parameter:
    return Parameter(what=what, value=value, unit=unit, origin=origin, source=source)


LINK_GBYTES_PER_S = _parameter("link", 12.5, "GB/s", Origin.DOCUMENT, "slides 15 and 43: 100 Gbps")
MEMORY_GBYTES_PER_S = _parameter(
    "DRAM", 136.5, "GB/s", Origin.DERIVED, "slide 43: DDR4, 8 channels of 8 bytes, 2133 MHz"
)
LAUNCH_US = _parameter(
    "kernel launch", _ON_59["GDS"].launch, "us", Origin.DOCUMENT, "slide 59, GDS and GPU-TN"
)
TEARDOWN_US = _parameter("kernel teardown", _ON_59["HDN"].teardown, "us", Origin.DOCUMENT, "slide 59, HDN")
EXECUTION_US = _parameter("empty kernel", _ON_59["HDN"].execution, "us", Origin.DOCUMENT, "slide 59, HDN")
TRIGGER_US = _parameter(
    "trigger from a kernel",
    round(_ON_59["GPU-TN"].execution - _ON_59["HDN"].execution, 2),
    "us",
    Origin.DERIVED,
    "slide 59: execution under GPU-TN less that under HDN",
)
HOST_PUT_US = _parameter("put by the host", _ON_59["HDN"].put, "us", Origin.DOCUMENT, "slide 59, HDN")
REGISTERED_PUT_US = _parameter(
    "put that was registered before", _ON_59["GDS"].put, "us", Origin.DOCUMENT, "slide 59, GDS"
)
NIC_INITIATOR_US = _parameter(
    "NIC, initiator", _ON_16["HSA"].initiator, "us", Origin.DOCUMENT, "slide 16, 64 B"
)
NETWORK_US = _parameter("network", _ON_16["HSA"].network, "us", Origin.DOCUMENT, "slide 16, 64 B")
NIC_TARGET_US = _parameter("NIC, target", _ON_16["HSA"].target, "us", Origin.DOCUMENT, "slide 16, 64 B")
XTQ_LAUNCH_SAVING_US = _parameter(
    "launch that XTQ saves",
    round(_ON_16["HSA"].launch - _ON_16["XTQ"].launch, 2),
    "us",
    Origin.DERIVED,
    "slide 16, 64 B: launch under HSA less that under XTQ",
)
XTQ_NIC_US = _parameter(
    "XTQ's work in both NICs",
    round(_ON_16["XTQ"].initiator + _ON_16["XTQ"].target - _ON_16["HSA"].initiator - _ON_16["HSA"].target, 2),
    "us",
    Origin.DERIVED,
    "slide 16, 64 B: both NIC stages under XTQ less those under HSA",
)
CACHE_US = _parameter(
    "access to the GPU's L2", 0.067, "us", Origin.DERIVED, "slide 35: 100 cycles at 1.5 GHz"
)
CP_PUT_US = _parameter(
    "put by a command processor",
    0.60,
    "us",
    Origin.ASSUMED,
    "the host's put at 2 instead of 4 GHz (slide 35)",
)
PCIE_US = _parameter(
    "one way over PCIe",
    0.5,
    "us",
    Origin.ASSUMED,
    "slide 21 says 'multiple trips over IO bus' without a figure",
)
HOST_THREADS = _parameter("host threads that serve the GPU", 8, "", Origin.DOCUMENT, "slide 21")
CP_THREADS = _parameter("command processor cores", 2, "", Origin.DOCUMENT, "slide 35")
PIECES = _parameter(
    "pieces of a chunk",
    24,
    "",
    Origin.ASSUMED,
    "one for each compute unit of slide 43; each is a work-group's message",
)
HAND_OVER_US = _parameter(
    "descriptor from one core to another",
    0.44,
    "us",
    Origin.MEASURED,
    "benchmarks/descriptor_queue.cpp, least time",
)
COUNTER_US = _parameter(
    "counter from one core to another",
    0.13,
    "us",
    Origin.MEASURED,
    "benchmarks/descriptor_queue.cpp, least time",
)

PARAMETERS = (
    LINK_GBYTES_PER_S,
    MEMORY_GBYTES_PER_S,
    LAUNCH_US,
    EXECUTION_US,
    TEARDOWN_US,
    TRIGGER_US,
    HOST_PUT_US,
    REGISTERED_PUT_US,
    NIC_INITIATOR_US,
    NETWORK_US,
    NIC_TARGET_US,
    XTQ_LAUNCH_SAVING_US,
    XTQ_NIC_US,
    CACHE_US,
    CP_PUT_US,
    PCIE_US,
    HOST_THREADS,
    CP_THREADS,
    PIECES,
    HAND_OVER_US,
    COUNTER_US,
)

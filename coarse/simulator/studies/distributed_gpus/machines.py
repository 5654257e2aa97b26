"""The test systems of the dissertation, and the simulation's parameters."""

from __future__ import annotations

from dataclasses import dataclass

from coarse.simulator.studies.sourced import Origin, Parameter


def _parameter(what: str, value: float, unit: str, origin: Origin, source: str) -> Parameter:
    return Parameter(what=what, value=value, unit=unit, origin=origin, source=source)


_DOCUMENT, _DERIVED, _FITTED, _ASSUMED = Origin.DOCUMENT, Origin.DERIVED, Origin.FITTED, Origin.ASSUMED

# ---- transfers (chapters 3 and 4) ----

QDR_MBYTES_PER_S = _parameter("Infiniband QDR", 3212, "MB/s", _FITTED, "Table 3.1a, host to host")
QDR_PEER_READ_MBYTES_PER_S = _parameter(
    "PCIe reads from a GPU, Sandy Bridge", 968, "MB/s", _FITTED, "Table 3.1a, GPU to host"
)
RMA_MBYTES_PER_S = _parameter("Extoll RMA", 892, "MB/s", _FITTED, "Table 3.1b, host to host")
RMA_PEER_READ_MBYTES_PER_S = _parameter(
    "PCIe reads from a GPU by Extoll", 769, "MB/s", _FITTED, "Table 3.1b, GPU to host"
)
PEER_WRITE_MBYTES_PER_S = _parameter(
    "PCIe writes to a GPU", 8000, "MB/s", _DOCUMENT, "chapter 1: PCIe 2.0, 16 lanes"
)
COPY_MBYTES_PER_S = _parameter("GPU's copy engine", 8000, "MB/s", _DOCUMENT, "chapter 1: PCIe 2.0, 16 lanes")
FDR_MBYTES_PER_S = _parameter("Infiniband FDR", 6000, "MB/s", _ASSUMED, "56 Gbps less encoding and headers")
FDR_PEER_READ_MBYTES_PER_S = _parameter(
    "PCIe reads from a GPU, Ivy Bridge", 2200, "MB/s", _DOCUMENT, "section 3.4.3"
)
IVY_COPY_MBYTES_PER_S = _parameter(
    "GPU's copy engine, Ivy Bridge", 15750, "MB/s", _DOCUMENT, "chapter 1: PCIe 3.0, 16 lanes"
)
STAGING_US = _parameter(
    "copy of a chunk: its start, and the event seen",
    4.77,
    "us",
    _FITTED,
    "on Sandy Bridge direct is best up to 8 kB, section 4.3.8",
)
PUT_US = _parameter(
    "put by the host, half a round", 3.0, "us", _DOCUMENT, "section 5.5.4, 'approximately 3 us'"
)

# ---- put and get by the GPU (chapter 5) ----

POST_US = _parameter("post, queues on the GPU", 10.66, "us", _DOCUMENT, "Table 5.4")
POLL_US = _parameter("poll, queues on the GPU", 8.27, "us", _DOCUMENT, "Table 5.4")
HOST_QUEUE_POST_US = _parameter("post, queues on the host", 12.46, "us", _DOCUMENT, "Table 5.4")
HOST_QUEUE_POLL_US = _parameter("poll, queues on the host", 15.69, "us", _DOCUMENT, "Table 5.4")
GPU_MBYTES_PER_S = _parameter("GPU to GPU, peak", 980, "MB/s", _DOCUMENT, "section 5.5.4")
PCIE_ACCESSES = _parameter(
    "PCIe accesses of a post, queues on the host", 15.5, "", _DERIVED, "Table 5.3: (147 + 1404) / 100"
)
GPU_QUEUE_PCIE_ACCESSES = _parameter(
    "PCIe accesses of a post, queues on the GPU", 1.97, "", _DERIVED, "Table 5.3: 197 / 100"
)
PCIE_ACCESS_US = _parameter(
    "PCIe access, one after the other",
    0.0538,
    "us",
    _FITTED,
    "40 % of the rate with 32 connections, Figure 5.15",
)
RMA_PUT_US = _parameter("Extoll put by the host, half a round", 4.9, "us", _DOCUMENT, "section 5.6.3")
RMA_FLAG_US = _parameter(
    "flag from a GPU to its host", 1.5, "us", _FITTED, "section 5.6.3: host-assisted 6.4 us less 4.9 us"
)
RMA_READS = _parameter(
    "PCIe reads of a round with notifications", 43.68, "", _DERIVED, "Table 5.5: 4368 / 100 iterations"
)
PCIE_READ_US = _parameter(
    "PCIe read of host memory by the GPU", 0.49, "us", _FITTED, "section 5.6.3: 15.9 us with notifications"
)

# ---- global address space (chapter 6) ----

STORE_US = _parameter("remote store, half a round", 3.0, "us", _DOCUMENT, "section 6.6.1, up to 1 kB")
LOAD_US = _parameter("remote load", 5.6, "us", _DOCUMENT, "section 6.6.1")
CYCLE_NS = _parameter("cycle of the Extoll FPGA", 1000 / 175, "ns", _DOCUMENT, "section 6.6: 175 MHz")
WIDTH_BYTES = _parameter("data path of the Extoll FPGA", 8, "B", _DOCUMENT, "section 6.6: 64 bits")
REQUEST_CYCLES = _parameter(
    "cycles of a request beside its data", 12, "", _FITTED, "stores of 128 B at 800 MB/s, section 6.6.2"
)
LOAD_MBYTES_PER_S = _parameter("remote loads, peak", 600, "MB/s", _DOCUMENT, "section 6.6.2")
OUTSTANDING_LOADS = _parameter("loads in flight", 25, "", _DOCUMENT, "section 6.6.2")
BARRIER_US = _parameter(
    "barrier's work inside a GPU", 2.85, "us", _FITTED, "barrier of 2 GPUs, 9 us, section 6.7.2"
)
BARRIER_KERNEL_US = _parameter(
    "kernel started by a kernel", 10, "us", _DOCUMENT, "section 6.7.2, 'around 10 us'"
)
GPU_REDUCTION_MBYTES_PER_S = _parameter(
    "reduction by a GPU, bytes read and written",
    288_000,
    "MB/s",
    _DOCUMENT,
    "chapter 1: device memory, a K40's",
)
COPY_TO_HOST_US = _parameter(
    "copy of few bytes between host and GPU", 12.25, "us", _DOCUMENT, "Table 4.1, stream synchronization"
)

# ---- applications ----

DEVICE_SYNC_US = _parameter("device synchronisation", 15.24, "us", _DOCUMENT, "Table 4.1")
STREAM_SYNC_US = _parameter("stream synchronisation", 12.25, "us", _DOCUMENT, "Table 4.1")
EVENT_US = _parameter("event synchronisation", 11.98, "us", _DOCUMENT, "Table 4.1")
BLOCKING_EVENT_US = _parameter("blocking event synchronisation", 65.71, "us", _DOCUMENT, "Table 4.1")
HIMENO_GFLOPS = _parameter(
    "Himeno on one K40", 168.8, "GFLOP/s", _FITTED, "speed-up of GASPI, size M, 16 GPUs, Figure 4.17"
)
MPI_US = _parameter(
    "MPI's extra time of an exchange", 25.6, "us", _FITTED, "speed-up of MPI, size M, 16 GPUs, Figure 4.17"
)
GPU_WATT = _parameter(
    "a busy GPU", 250, "W", _DOCUMENT, "chapter 1: a K20's design power; its draw is not printed"
)
HYBRID_CPU_WATT = _parameter("CPU that controls communication", 50, "W", _DOCUMENT, "section 5.8.5")
SLEEPING_CPU_WATT = _parameter("sleeping CPU", 26.5, "W", _DERIVED, "section 5.8.5: between 24 and 29 W")
HYBRID_DRAM_WATT = _parameter("DRAM, hybrid", 3.9, "W", _DOCUMENT, "section 5.8.5")
SLEEPING_DRAM_WATT = _parameter("DRAM, sleeping CPU", 2.2, "W", _DOCUMENT, "section 5.8.5")
STREAM_OVERHEAD = _parameter(
    "GPU-controlled communication by computation, 256 x 256 x 256",
    0.0417,
    "",
    _FITTED,
    "96 % of the hybrid, section 5.8.4",
)

PARAMETERS = tuple(value for value in globals().values() if isinstance(value, Parameter))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of the paths between the memories of two nodes, in MB/s (1e6)."""

    name: str
    link: Parameter
    peer_read: Parameter
    copy: Parameter


SANDY_BRIDGE = Machine(
    name="Sandy Bridge, QDR",
    link=QDR_MBYTES_PER_S,
    peer_read=QDR_PEER_READ_MBYTES_PER_S,
    copy=COPY_MBYTES_PER_S,
)
IVY_BRIDGE = Machine(
    name="Ivy Bridge, FDR",
    link=FDR_MBYTES_PER_S,
    peer_read=FDR_PEER_READ_MBYTES_PER_S,
    copy=IVY_COPY_MBYTES_PER_S,
)
EXTOLL = Machine(
    name="Extoll RMA", link=RMA_MBYTES_PER_S, peer_read=RMA_PEER_READ_MBYTES_PER_S, copy=COPY_MBYTES_PER_S
)

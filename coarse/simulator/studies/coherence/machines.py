"""The document's machines (Table 3.1), made smaller.

A GPU has 4 of its 64 CUs, and 1/16 of each bandwidth. Caches are 1/64 of Table 3.1 for each GPU, in its
associativities, and arrays are smaller to match.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coarse.simulator.studies.coherence.kernels import Workload
from coarse.simulator.studies.coherence.operations import CoherenceProtocol, Kind, Shape
from coarse.simulator.studies.coherence.protocols.hmg import Hmg
from coarse.simulator.studies.coherence.protocols.mgcc import PRINTED, Mgcc, Rules
from coarse.simulator.studies.coherence.protocols.rdma import Rdma
from coarse.simulator.studies.coherence.protocols.uncoherent import Uncoherent
from coarse.simulator.studies.coherence.timing import Instruction, Kernel, KernelRun, Outcome, Speeds

SHARE = 16
"""A bandwidth of the document over ours."""

SHAPE = Shape(
    num_gpus=4, cus_per_gpu=4, banks=2, l1_sets=16, l1_ways=4, l2_sets=16, l2_ways=16, controllers=2
)

GBYTES_PER_S = 32.0
"""Of a GPU's link to memory, and of PCIe 4.0, each direction (section 3.2.1)."""

CROSSBAR_BYTES_PER_NS, HBM_BYTES_PER_NS = 512.0, 2048.0  # assumed: 64 bytes a cycle of each bank; 8 stacks
L2_NS, SWITCH_NS, PCIE_NS, DRAM_NS = 20.0, 30.0, 250.0, 100.0  # assumed, one way
RESIDENT, LINES_IN_FLIGHT = 2, 16  # wavefronts of a CU, and lines of each: assumed


def parts(gbytes_per_s: float = GBYTES_PER_S, num_controllers: int = 2) -> Mapping[str, tuple[float, float]]:
    """Bytes per ns and latency of each part."""
    crossbar = CROSSBAR_BYTES_PER_NS / SHARE
    return {
        "L2 up": (crossbar, L2_NS),
        "L2 down": (crossbar, L2_NS),
        "memory up": (gbytes_per_s / SHARE, SWITCH_NS),
        "memory down": (gbytes_per_s / SHARE, SWITCH_NS),
        "channel": (HBM_BYTES_PER_NS / SHARE / num_controllers, 0.0),
        "DRAM": (HBM_BYTES_PER_NS / SHARE / 4, 0.0),
        "memory": (0.0, DRAM_NS),
        "PCIe out": (GBYTES_PER_S / SHARE, PCIE_NS),
        "PCIe in": (GBYTES_PER_S / SHARE, PCIE_NS),
    }


def simulate(
    configuration: str,
    kernels: Sequence[Kernel],
    *,
    num_gpus: int = 4,
    gbytes_per_s: float = GBYTES_PER_S,
    rules: Rules = PRINTED,
    resident: int = RESIDENT,
    keeps_caches: bool = False,
    shape: Shape = SHAPE,
) -> Outcome:
    """Runs kernels on one of the configurations of section 4.3.1, or on "RDMA".

    Args:
        configuration: "RDMA", "HMG", "WB-NC-RC", "WT-NC-RC", "C-RC" or "C-SC".
        kernels, keeps_caches: As for KernelRun.run.
        num_gpus: GPUs.
        gbytes_per_s: Bandwidth of a GPU's link to shared memory.
        rules: Of MGCC.
        resident: Wavefronts that a CU runs at a time.
        shape: Caches and CUs of a GPU.

    Raises:
        ValueError: If no configuration has that name.
    """
    protocol = _protocol(configuration, replace(shape, num_gpus=num_gpus), rules)
    in_order = configuration.endswith("SC")
    speeds = Speeds(
        parts=parts(gbytes_per_s),
        resident=resident,
        lines_in_flight=0 if in_order else LINES_IN_FLIGHT,
    )
    outcome = KernelRun(protocol, speeds).run(kernels, keeps_caches=keeps_caches)
    if isinstance(protocol, Rdma | Hmg):
        protocol.flush()
        outcome.statistics = protocol.statistics()
    return outcome


def run_benchmark(configuration: str, workload: Workload, **options: Any) -> Outcome:
    """As simulate(), with the copies before and after that GPUs with memory of their own need."""
    outcome = simulate(configuration, workload.kernels, **options)
    if configuration in ("RDMA", "HMG"):
        outcome.ns += (workload.input_lines + workload.output_lines) * _host_ns_per_line()
    return outcome


def _protocol(configuration: str, shape: Shape, rules: Rules) -> CoherenceProtocol:
    if configuration == "RDMA":
        return Rdma(shape)
    if configuration == "HMG":
        return Hmg(shape)
    if configuration in ("WB-NC-RC", "WT-NC-RC"):
        return Uncoherent(shape, writes_back=configuration.startswith("WB"))
    if configuration in ("C-RC", "C-SC"):
        return Mgcc(shape, rules)
    raise ValueError(f"there is no configuration {configuration!r}")


def _host_ns_per_line() -> float:
    """All GPUs' lines go through the processor's one link."""
    return Kind.WRITE_REQUEST.nbytes / (GBYTES_PER_S / SHARE)


def simulate_tracker(*, holds_slots_to_the_end: bool) -> float:
    """Bytes per ns that one controller serves, of lines that no cache has, over links 8 times as fast."""
    shape = replace(SHAPE, controllers=1)
    protocol = Uncoherent(shape, writes_back=True, holds_slots_to_the_end=holds_slots_to_the_end)
    speeds = Speeds(parts=parts(8 * GBYTES_PER_S), resident=1, lines_in_flight=64)
    kernel = [[Instruction((line,)) for line in range(first, first + 128)] for first in range(0, 2048, 128)]
    outcome = KernelRun(protocol, speeds).run([kernel])
    return 2048 * Kind.SERVICE.nbytes / outcome.ns


def simulate_gtsc(make: Callable[[Shape], CoherenceProtocol]) -> Outcome:
    """Private rewrites on one GPU's 4 CUs, under a protocol for one GPU: 8 lines of each vector for a CU."""
    speeds = Speeds(parts=parts(), resident=1, lines_in_flight=LINES_IN_FLIGHT)
    kernels = [[private_rewrites(8 * 3 * cu, 8) for cu in range(SHAPE.cus_per_gpu)]]
    return KernelRun(make(replace(SHAPE, num_gpus=1)), speeds).run(kernels)


def private_rewrites(first: int, lines: int, times: int = 11) -> list[Instruction]:
    """C = A + B and A = C + B on three neighbouring slices, each several times."""
    program = []
    for target, source in ((2, 0), (0, 2)):
        for _ in range(times):
            for line in range(lines):
                program += [Instruction((first + part * lines + line,)) for part in (source, 1)]
                program.append(Instruction((first + target * lines + line,), is_write=True, waits=True))
    return program

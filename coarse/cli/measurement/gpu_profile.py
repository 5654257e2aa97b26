"""`coarse profile --gpus`: the topology of this machine's GPUs, and the bandwidth of their links."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import; `coarse --help` must not load these
    from coarse.machine.gpu_topology import GpuTopology
    from coarse.profiler.gpu_links import GpuLinks, GpuPath

_EXIT_FAILED = 1


def run(json_file: Path | None) -> int:
    """Measures the links, prints the figures and writes them to `json_file`; returns an exit code."""
    from coarse.errors import CoarseError
    from coarse.kernels import _native
    from coarse.machine.gpu_topology import is_nvlink_disabled, read_gpu_topology

    if reason := _native.cuda_unavailable_reason():
        print(f"coarse profile: --gpus: {reason}", file=sys.stderr)
        return _EXIT_FAILED
    uuids = [_native.cuda_device_uuid(gpu) for gpu in range(_native.cuda_num_devices())]
    try:
        print_topology(read_gpu_topology(), uuids)
    except (CoarseError, ValueError) as error:
        print(f"coarse profile: topology of GPUs: {error}", file=sys.stderr)
    if is_nvlink_disabled():
        print("NVLink is disabled in the driver (NVreg_NvLinkDisable=1): GPUs have only PCIe")
    try:
        links = _measure(len(uuids))
    except _native.CudaError as error:
        print(f"coarse profile: --gpus: {error}", file=sys.stderr)
        return _EXIT_FAILED
    print_links(links)
    if json_file is None:
        return 0
    try:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(links.to_json() + "\n")
    except OSError as error:
        print(f"coarse profile: {error.filename or json_file}: {error.strerror}", file=sys.stderr)
        return _EXIT_FAILED
    return 0


def print_topology(topology: GpuTopology, uuids: list[str]) -> None:
    """Prints the GPU topology, in CUDA's order.

    Raises:
        ValueError: If NVML does not report one of the GPUs.
    """
    from coarse.cli.display.tables import print_table

    numbers = [topology.find(uuid) for uuid in uuids]
    columns = ("", "model", "bus id", "NUMA node", *(f"cuda:{gpu}" for gpu in range(len(numbers))))
    rows = []
    for gpu, number in enumerate(numbers):
        place = topology.gpus[number]
        node = "unknown" if place.numa_node is None else str(place.numa_node)
        ways = [_way(topology, number, other) for other in numbers]
        rows.append((f"cuda:{gpu}", place.name, place.bus_id, node, *ways))
    print_table("GPUs and the connections between them", columns, rows)


def print_links(links: GpuLinks) -> None:
    """Prints latencies and bandwidths."""
    from coarse.bench.provenance import BenchMachine
    from coarse.cli.display.tables import format_size, print_table

    smallest = next(iter(links.curves.values())).points[0].nbytes
    print(f"measured on {', '.join(links.gpus)}; {BenchMachine.here()}; host memory is pinned")
    print_table(
        "Copies: highest bandwidth, sum of both directions",
        ("path", f"{format_size(smallest)}, us", "alpha, us", "beta, GB/s", "highest, GB/s"),
        _rows(links),
    )
    for gpu, peer in links.unreachable:
        print(f"cuda:{gpu} cannot access cuda:{peer}: copies between them went through the host's memory")


def _rows(links: GpuLinks) -> Iterator[tuple[str, ...]]:
    path: GpuPath
    for path, curve in links.curves.items():
        fit = curve.fit()
        yield (
            str(path),
            f"{curve.latency_us:.1f}",
            f"{fit.alpha_us:.1f}",
            f"{fit.beta_gbytes_per_s * len(path.ways):.4g}",
            f"{links.peak_gbytes_per_s(path):.4g}",
        )


def _way(topology: GpuTopology, one: int, other: int) -> str:
    if one == other:
        return "-"
    links = topology.nvlinks[one][other]
    return str(topology.distances[one][other]) + (f", {links} NVLinks" if links else "")


def _measure(num_gpus: int) -> GpuLinks:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from coarse.kernels import _native
    from coarse.profiler.gpu_links import SIZES, DriverCopier, measure_gpu_links

    columns = (TextColumn("measuring GPUs"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with (
        closing(DriverCopier(num_gpus, max(SIZES))) as copier,
        Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar,
    ):
        task = bar.add_task("", total=1.0)
        return measure_gpu_links(
            [_native.cuda_device_name(gpu) for gpu in range(num_gpus)],
            _native.cuda_reaches_peer,
            copier,
            progress=lambda done: bar.update(task, completed=done),
        )

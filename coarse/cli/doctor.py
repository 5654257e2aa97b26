"""`coarse doctor`: shows what COARSE can use on this machine, what is missing, and how to install it."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from coarse import __version__
from coarse.cli.measurement.sync_probe import (
    NUM_ELEMENTS,
    NUM_WORKERS,
    SCRIPT_MODULE,
    SyncProbeError,
    probe_sync,
)
from coarse.cli.workers.failure import signal_name
from coarse.env import compiler_command, own_process_environment
from coarse.errors import SettingsError
from coarse.machine.host import (
    Cpu,
    DaxDevice,
    Gpu,
    Host,
    Limit,
    MemoryAccess,
    NumaNode,
    SystemMemory,
    read_host,
)
from coarse.settings import Settings

GOOD, NOTE, FAILED = "ok", "note", "failed"
"""Status of a finding. Only a failed finding causes exit code 1; a note suggests an improvement."""

_MARKS = {GOOD: "[green]ok[/]", NOTE: "[yellow]note[/]", FAILED: "[bold red]failed[/]"}
_NATIVE_MODULE = "coarse.kernels._native"
_NCCL_MODULE = "coarse.kernels.nccl"
_CUDA_MODULE = "coarse.proxy.memory.cuda"
_TOOL_LIMIT_S = 10
_GPUS_LIMIT_S = 120  # each sleeping GPU takes seconds to wake up, and its context takes more
_ENOUGH_FILES = 4096
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table.

    Args:
        topic: Heading of the table section.
        name: The checked item.
        value: The result.
        status: GOOD, NOTE or FAILED.
        advice: Recommended action; "" if none.
    """

    topic: str
    name: str
    value: str
    status: str = GOOD
    advice: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `doctor` to the `coarse` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what COARSE can use on this machine, what is missing and how to install it",
        description="Checks versions, cores, memory, devices and limits, and tries a two-worker sync. "
        "Exit code 1 if an essential check fails.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Examines this machine and prints the findings; returns 1 if an essential check fails, otherwise 0."""
    host = read_host()
    findings = examine(host)
    if arguments.json:
        print(as_json(host, findings))
    else:
        _print_table(findings)
    return 0 if is_healthy(findings) else 1


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether no finding failed."""
    return all(finding.status != FAILED for finding in findings)


def examine(host: Host) -> list[Finding]:
    """Returns all findings, in the order of the table. Starts processes and waits for them."""
    cuda = cuda_findings()
    return [
        *_software(host),
        *_peers(),
        *cpu_findings(host.cpu),
        *memory_findings(host.memory),
        *numa_findings(host.numa_nodes),
        *device_findings(host.dax_devices, host.gpus, host.gpus_note, has_cuda=bool(cuda)),
        *cuda,
        *nccl_findings(host.gpus),
        *settings_findings(host.memory),
        *limit_findings(host.limits),
        *_runtime(),
    ]


def as_json(host: Host, findings: Sequence[Finding]) -> str:
    """Returns one JSON object: coarse (version), ok, findings, and host (the examined data)."""
    record = {
        "coarse": __version__,
        "ok": is_healthy(findings),
        "findings": [asdict(finding) for finding in findings],
        "host": asdict(host),
    }
    return json.dumps(record, indent=2)


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    topic = None
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            table.add_row("", f"\n[bold]{topic}[/]", "")
        table.add_row(_MARKS[finding.status], finding.name, _with_advice(finding))
    Console(highlight=False).print(table)


def _with_advice(finding: Finding) -> str:
    from rich.markup import escape

    advice = f"\n[yellow]{escape(finding.advice)}[/]" if finding.advice else ""
    return escape(finding.value) + advice


def _software(host: Host) -> list[Finding]:
    topic = "software"
    return [
        Finding(topic=topic, name="coarse", value=__version__),
        Finding(topic=topic, name="Python", value=platform.python_version()),
        Finding(topic=topic, name="kernel", value=f"{host.kernel} ({host.architecture})"),
        _package(topic, "numpy", missing=FAILED, advice="pip install numpy"),
        _package(topic, "torch", missing=NOTE, advice="pip install torch, for coarse.torch"),
        _compiler(topic),
    ]


def _peers() -> list[Finding]:
    topic = "peers (optional)"
    build = "build horovod 0.28.1 from source, with CMAKE_CXX_STANDARD 17 in its CMakeLists"
    return [
        _package(topic, "mpich", missing=NOTE, advice="pip install mpich"),
        _package(topic, "mpi4py", missing=NOTE, advice="pip install mpi4py"),
        _open_mpi(topic),
        _package(topic, "horovod", missing=NOTE, advice=build),
    ]


def _package(topic: str, name: str, *, missing: str, advice: str) -> Finding:
    try:
        return Finding(topic=topic, name=name, value=metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(topic=topic, name=name, value="not installed", status=missing, advice=advice)


def _compiler(topic: str) -> Finding:
    name = "C++ compiler"
    for candidate in (" ".join(compiler_command()), "c++", "g++", "clang++"):
        version = _first_line(candidate, "--version") if candidate else ""
        if version:
            return Finding(topic=topic, name=name, value=f"{candidate}: {version}")
    advice = "needed to build from source: apt-get install g++"
    return Finding(topic=topic, name=name, value="none", status=NOTE, advice=advice)


def _open_mpi(topic: str) -> Finding:
    for command in ("mpirun.openmpi", "mpirun"):
        version = _first_line(command, "--version")
        if "Open MPI" in version:
            return Finding(topic=topic, name="openmpi", value=version.rpartition(" ")[2])
    advice = "apt-get install openmpi-bin"
    return Finding(topic=topic, name="openmpi", value="not installed", status=NOTE, advice=advice)


def _first_line(*command: str) -> str:
    """Returns the first line of a tool's output; "" if the tool is missing or fails."""
    return _ask(*command)[0]


def _ask(*command: str, limit_s: float = _TOOL_LIMIT_S) -> tuple[str, str]:
    """Returns the first line of a tool's output, or "" and the reason why there is none."""
    program = shutil.which(command[0])
    if program is None:
        return "", f"{command[0]} is not there"
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, timeout=limit_s, env=own_process_environment()
        )
    except OSError as error:
        return "", str(error)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {limit_s} s"
    if done.returncode < 0:
        return "", f"killed by {signal_name(-done.returncode)}"
    if done.returncode > 0:
        return "", (done.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"])[-1]
    return done.stdout.decode(errors="replace").partition("\n")[0].strip(), ""


def cpu_findings(cpu: Cpu) -> list[Finding]:
    """Cores, the usable share of them, and instruction sets."""
    topic = "cores"
    quota = "no quota" if cpu.quota_cores is None else f"{cpu.quota_cores:g} by cgroup quota"
    share = f"{cpu.num_cores} online, {cpu.num_cores_allowed} by affinity, {quota}"
    few = cpu.num_cores_granted < 2
    return [
        Finding(topic=topic, name="model", value=cpu.model or "unknown"),
        Finding(
            topic=topic,
            name="cores",
            value=f"{cpu.num_cores_granted} to use ({share})",
            status=NOTE if few else GOOD,
            advice="workers and memory devices share one core: grant two or more" if few else "",
        ),
        Finding(topic=topic, name="vector units", value=", ".join(cpu.vector_flags) or "baseline only"),
    ]


def memory_findings(memory: SystemMemory) -> list[Finding]:
    """Size, limit and page settings."""
    topic = "memory"
    size = f"{format_bytes(memory.available_bytes)} available of {format_bytes(memory.total_bytes)}"
    explicit = f"{memory.huge_pages} of {format_bytes(memory.huge_page_bytes)}"
    return [
        Finding(topic=topic, name="size", value=size),
        Finding(topic=topic, name="cgroup limit", value=_cgroup_memory(memory)),
        Finding(topic=topic, name="/dev/shm", value="for NCCL alone: memory devices use sealed memfds"),
        _transparent_pages(topic, memory),
        Finding(topic=topic, name="explicit huge pages", value=explicit),
    ]


def settings_findings(memory: SystemMemory) -> list[Finding]:
    """COARSE_* variables that are relevant on this machine, and errors in them."""
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        advice = "unset the variable, or correct it"
        return [Finding(topic="settings", name="COARSE_*", value=str(error), status=FAILED, advice=advice)]
    return [pool_finding(memory, settings), *compression_findings(settings), *transfer_findings(settings)]


def pool_finding(memory: SystemMemory, settings: Settings) -> Finding:
    """The limit for old versions while a checkpoint is written (choose_pool_limit() of proxy.snapshots)."""
    variable = "COARSE_SNAPSHOT_POOL_BYTES"
    available = memory.available_bytes
    if memory.cgroup_limit_bytes is not None:
        available = min(available, memory.cgroup_limit_bytes - (memory.cgroup_used_bytes or 0))
    chosen = settings.snapshot_pool_bytes
    value = (
        f"{format_bytes(chosen)} for each model, by {variable}"
        if chosen
        else f"as large as a model with its state, at most {format_bytes(max(0, available) // 2)} now"
    )
    is_too_large = chosen > available
    return Finding(
        topic="settings",
        name="snapshot pool",
        value=value,
        status=NOTE if is_too_large else GOOD,
        advice=f"more than is available: lower {variable}, or unset it" if is_too_large else "",
    )


def _cgroup_memory(memory: SystemMemory) -> str:
    if memory.cgroup_limit_bytes is None:
        return "none"
    used = "" if memory.cgroup_used_bytes is None else f", {format_bytes(memory.cgroup_used_bytes)} used"
    return format_bytes(memory.cgroup_limit_bytes) + used


def _transparent_pages(topic: str, memory: SystemMemory) -> Finding:
    off = memory.transparent_shared in ("", "never", "deny")
    advice = "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (fewer TLB misses)"
    return Finding(
        topic=topic,
        name="transparent huge pages",
        value=f"{memory.transparent or 'none'}; shared memory: {memory.transparent_shared or 'none'}",
        status=NOTE if off else GOOD,
        advice=advice if off else "",
    )


def numa_findings(nodes: Sequence[NumaNode]) -> list[Finding]:
    """One finding for each NUMA node; memory without cores is reported as possible CXL memory."""
    if not nodes:
        return [Finding(topic="NUMA", name="nodes", value="none reported")]
    return [Finding(topic="NUMA", name=f"node {node.node}", value=_numa_node(node)) for node in nodes]


def _numa_node(node: NumaNode) -> str:
    size = format_bytes(node.memory_bytes)
    name = f" (--memory-devices numa:{node.node})"
    cores = f"no cores: possibly CXL memory{name}" if node.is_memory_only else f"{len(node.cores)} cores"
    return ", ".join([size, cores, *describe_access(node.access)])


def describe_access(access: MemoryAccess) -> list[str]:
    """The firmware's figures for reads and writes of a node's memory, if available."""
    found = []
    for name, latency_ns, gbytes_per_s in (
        ("reads", access.read_latency_ns, access.read_gbytes_per_s),
        ("writes", access.write_latency_ns, access.write_gbytes_per_s),
    ):
        latency = [] if latency_ns is None else [f"{latency_ns:g} ns"]
        bandwidth = [] if gbytes_per_s is None else [f"{gbytes_per_s:g} GB/s"]
        if figures := " ".join(latency + bandwidth):
            found.append(f"{name} {figures} by its firmware")
    return found


def device_findings(
    dax_devices: Sequence[DaxDevice], gpus: Sequence[Gpu], gpus_note: str = "", *, has_cuda: bool = False
) -> list[Finding]:
    """DAX devices and GPUs; a machine without them is not an error.

    Args:
        dax_devices: All DAX devices.
        gpus: GPUs that NVML reports.
        gpus_note: Why `gpus` may be incomplete; "" if it is complete.
        has_cuda: Whether CUDA finds GPUs on this machine.
    """
    topic = "devices"
    dax = [Finding(topic=topic, name=device.name, value=_dax_device(device)) for device in dax_devices]
    cards = [
        Finding(
            topic=topic,
            name=f"GPU {index}",
            value=f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, driver {gpu.driver}{_nearest_node(gpu)}",
        )
        for index, gpu in enumerate(gpus)
    ]
    return [
        *(dax or [Finding(topic=topic, name="DAX", value="none")]),
        *cards,
        *_gpus_not_seen(len(gpus), gpus_note, has_cuda),
    ]


def _nearest_node(gpu: Gpu) -> str:
    return "" if gpu.node is None else f", nearest to NUMA node {gpu.node}"


def _gpus_not_seen(num_seen: int, note: str, has_cuda: bool) -> list[Finding]:
    topic, name = "devices", "GPU"
    if num_seen or has_cuda:
        advice = "without NVML, workers are paired with memory devices only by their numbers"
        return [Finding(topic=topic, name=name, value=note, status=NOTE, advice=advice)] if note else []
    return [Finding(topic=topic, name=name, value=note or "none")]


def cuda_findings() -> list[Finding]:
    """GPUs in CUDA's order, and a trial whether they can be memory devices; empty without CUDA.

    Starts a separate process, so that this one has no contexts on the GPUs.
    """
    # As _native_module(), which this needs.
    code = f"import json; from {_CUDA_MODULE} import describe_gpus; print(json.dumps(describe_gpus()))"
    topic, name = "devices", "memory devices on GPUs"
    found, why_not = _ask(sys.executable, "-c", code, limit_s=_GPUS_LIMIT_S)
    if why_not:
        return [Finding(topic=topic, name=name, value=f"tried in vain: {why_not}", status=NOTE)]
    gpus, missing = json.loads(found)
    if not gpus:
        return []
    return [Finding(topic=topic, name=name, value=gpus, status=NOTE if missing else GOOD, advice=missing)]


def nccl_findings(gpus: Sequence[Gpu]) -> list[Finding]:
    """NCCL, which reduces between GPUs; empty if it is neither installed nor needed. Starts a process."""
    topic, name = "devices", "NCCL"
    # As _native_module(), which this needs.
    code = f"from {_NCCL_MODULE} import describe, find_nccl; print(describe(find_nccl()))"
    found = _first_line(sys.executable, "-c", code)
    if found:
        return [Finding(topic=topic, name=name, value=found.removeprefix("NCCL "))]
    if len(gpus) < 2:
        return []
    advice = "for all-reduces between GPUs: pip install 'coarse-train[nccl]'"
    return [Finding(topic=topic, name=name, value="none", status=NOTE, advice=advice)]


def compression_findings(settings: Settings) -> list[Finding]:
    """How gradients travel between nodes; empty unless a setting requests a compression."""
    compression = settings.node_compression
    if compression == "none":
        return []
    return [
        Finding(
            topic="settings",
            name="between nodes",
            value=f"float32 gradients as {compression}, by COARSE_NODE_COMPRESSION, which must be alike on all nodes",
        )
    ]


def transfer_findings(settings: Settings) -> list[Finding]:
    """Whether the processor copies gradients of GPUs; empty unless a setting requests it."""
    variable = "COARSE_GPU_TRANSFERS"
    if settings.gpu_transfers != "off":
        return []
    return [
        Finding(
            topic="settings",
            name="gradients on GPUs",
            value=f"copied by the processor, by {variable}=off",
            status=NOTE,
            advice=f"slower: unset {variable} where nothing is wrong without it",
        )
    ]


def _dax_device(device: DaxDevice) -> str:
    node = "" if device.node is None else f", NUMA node {device.node}"
    if device.is_system_ram:
        use = f"managed as memory of that node (--memory-devices numa:{device.node})"
    elif not device.is_file:
        use = f"not to be used: there is no /dev/{device.name} (see daxctl list; containers have to be given it)"
    else:
        use = f"(--memory-devices dax:/dev/{device.name})"
    return f"{format_bytes(device.memory_bytes)}{node} {use}"


def limit_findings(limits: Sequence[Limit]) -> list[Finding]:
    """Resource limits, with a note on too few open files."""
    return [_limit(limit) for limit in limits]


def _limit(limit: Limit) -> Finding:
    scarce = limit.name == "nofile" and limit.soft is not None and limit.soft < _ENOUGH_FILES
    show = str if limit.name == "nofile" else format_bytes
    return Finding(
        topic="limits",
        name=limit.name,
        value=f"{_limit_value(limit.soft, show)} (hard: {_limit_value(limit.hard, show)})",
        status=NOTE if scarce else GOOD,
        advice=f"ulimit -n {_ENOUGH_FILES}, for many workers on one node" if scarce else "",
    )


def _limit_value(value: int | None, show: Callable[[int], str]) -> str:
    return "unlimited" if value is None else show(value)


def _runtime() -> list[Finding]:
    native = _native_module()
    if native.status == FAILED:
        skipped = Finding(
            topic=native.topic, name="two-worker sync", value="not tried", status=FAILED, advice="see above"
        )
        return [native, skipped]
    return [native, _two_worker_sync(native.topic)]


def _native_module() -> Finding:
    """Loads the native module in a separate process, because a wrong instruction set would crash this one."""
    topic, name = "runtime", "native module"
    command = [sys.executable, "-c", f"import {_NATIVE_MODULE}"]
    done = subprocess.run(command, capture_output=True, env=own_process_environment())
    if done.returncode == 0:
        return Finding(topic=topic, name=name, value="loads")
    reason = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
    if done.returncode < 0:
        reason = f"killed by {signal_name(-done.returncode)}"
    advice = "build it: pip install . in the source tree (needs a C++17 compiler)"
    return Finding(topic=topic, name=name, value=f"does not load: {reason}", status=FAILED, advice=advice)


def _two_worker_sync(topic: str) -> Finding:
    name = "two-worker sync"
    try:
        latency = probe_sync()
    except SyncProbeError as error:
        advice = f"see all of it: coarse run -n {NUM_WORKERS} -m {SCRIPT_MODULE} $(mktemp -d)"
        return Finding(topic=topic, name=name, value=f"fails: {error}", status=FAILED, advice=advice)
    size = format_bytes(NUM_ELEMENTS * 4)
    value = f"works; {size} in {latency.p50_us:.0f} us (p50), {latency.p99_us:.0f} us (p99), measured"
    return Finding(topic=topic, name=name, value=value)


def format_bytes(nbytes: int) -> str:
    """Returns a size in the largest binary unit in which it is at least 1, such as "23.5 GiB"."""
    exponent = min(max(nbytes.bit_length() - 1, 0) // 10, len(_BYTE_UNITS) - 1)
    return f"{nbytes / 1024**exponent:.4g} {_BYTE_UNITS[exponent]}"

"""Facts about this machine: cores, memory, NUMA nodes, DAX devices, GPUs, limits.

Each `read_*` collects one frozen value from /proc and /sys, never fails if a kernel lacks a file, and takes another
`root` for tests. Each `parse_*` is a pure function of a file's text. Sizes are in bytes.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coarse.machine.pci import normal_bus_id, read_pci_node

_ROOT = Path("/")
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of the page size
_VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Cores of this machine, and this process's share of them.

    Args:
        model: The kernel's name of the processor; "" if unknown.
        num_cores: Number of online cores.
        num_cores_allowed: Number of cores in the affinity mask.
        quota_cores: The cgroup's quota of processor time, in cores; None without a quota.
        vector_flags: Instruction sets among which kernels choose.
    """

    model: str
    num_cores: int
    num_cores_allowed: int
    quota_cores: float | None
    vector_flags: tuple[str, ...]

    @property
    def num_cores_granted(self) -> int:
        """Number of usable cores: the smaller of affinity mask and quota, at least 1."""
        return _granted_cores(self.num_cores_allowed, self.quota_cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemMemory:
    """Memory of this machine.

    Args:
        total_bytes: Memory that the kernel manages.
        available_bytes: Memory available without swapping.
        cgroup_limit_bytes: The lowest limit of this process's cgroup and its ancestors; None without one.
        cgroup_used_bytes: Memory use of the cgroup with that limit, including page cache; None without a limit.
        huge_pages: Number of explicit huge pages.
        huge_page_bytes: Size of a huge page.
        transparent: Setting of transparent huge pages for private memory; "" if the kernel has none.
        transparent_shared: The same for shared memory, which memory devices use.
    """

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    cgroup_used_bytes: int | None
    huge_pages: int
    huge_page_bytes: int
    transparent: str
    transparent_shared: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccess:
    """Firmware data (ACPI's HMAT) on access to a node's memory from its nearest processors.

    Bandwidths are in 1e9 bytes per second; None if the firmware gives no value.
    """

    read_latency_ns: float | None = None
    write_latency_ns: float | None = None
    read_gbytes_per_s: float | None = None
    write_gbytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node. A node with memory and no cores may be CXL memory.

    Args:
        node: Number of the node.
        cores: Cores of the node.
        memory_bytes: Size of its memory.
        distances: Distances to each online node, in the order of their numbers: 10 to itself, 20 to a node that takes
            twice as long; () if the kernel reports none.
        initiators: The nodes whose processors reach its memory best, by the firmware; () if unknown.
        access: Firmware data on access; for processors only, if the firmware distinguishes them from other
            initiators.
    """

    node: int
    cores: tuple[int, ...]
    memory_bytes: int
    distances: tuple[int, ...] = ()
    initiators: tuple[int, ...] = ()
    access: MemoryAccess = MemoryAccess()

    @property
    def is_memory_only(self) -> bool:
        """Whether it has memory and no cores."""
        return not self.cores and self.memory_bytes > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DaxDevice:
    """Memory that a driver offers to programs as /dev/dax, or to the system as a NUMA node.

    Args:
        name: Such as "dax0.0".
        memory_bytes: Size of its memory; 0 before setup.
        node: NUMA node of its memory; None if the kernel does not report it.
        is_file: Whether it exists in /dev, where programs map it.
        is_system_ram: Whether the system uses it as RAM.
    """

    name: str
    memory_bytes: int
    node: int | None
    is_file: bool = True
    is_system_ram: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU from NVML; `node` is the nearest NUMA node, None if the kernel does not report it."""

    name: str
    memory_bytes: int
    driver: str
    node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A resource limit of this process; None means unlimited."""

    name: str
    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """All facts together; `gpus_note` explains missing GPUs."""

    kernel: str
    architecture: str
    cpu: Cpu
    memory: SystemMemory
    numa_nodes: tuple[NumaNode, ...]
    dax_devices: tuple[DaxDevice, ...]
    gpus: tuple[Gpu, ...]
    gpus_note: str
    limits: tuple[Limit, ...]

    @property
    def cxl_nodes(self) -> tuple[NumaNode, ...]:
        """The NUMA nodes with memory and no cores: Linux shows CXL memory that it manages as such nodes."""
        return tuple(node for node in self.numa_nodes if node.is_memory_only)


def read_host(root: Path = _ROOT) -> Host:
    """Returns all facts about this machine."""
    gpus, gpus_note = read_gpus(root)
    return Host(
        kernel=platform.release(),
        architecture=platform.machine(),
        cpu=read_cpu(root),
        memory=read_memory(root),
        numa_nodes=read_numa_nodes(root),
        dax_devices=read_dax_devices(root),
        gpus=gpus,
        gpus_note=gpus_note,
        limits=read_limits(),
    )


def read_cpu(root: Path = _ROOT) -> Cpu:
    """Returns the cores of this machine and this process's share of them."""
    fields = parse_fields(_text(root / "proc/cpuinfo"))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return Cpu(
        model=fields.get("model name", ""),
        num_cores=os.cpu_count() or 1,
        num_cores_allowed=len(os.sched_getaffinity(0)),
        quota_cores=_quota_cores(root),
        vector_flags=tuple(flag for flag in _VECTOR_FLAGS if flag in flags),
    )


def count_granted_cores(root: Path = _ROOT) -> int:
    """Like Cpu.num_cores_granted, without reading other properties of the cores."""
    return _granted_cores(len(os.sched_getaffinity(0)), _quota_cores(root))


def _granted_cores(num_allowed: int, quota: float | None) -> int:
    return num_allowed if quota is None else max(1, min(num_allowed, int(quota)))


def read_memory(root: Path = _ROOT) -> SystemMemory:
    """Returns the memory of this machine and this process's share of it."""
    fields = parse_fields(_text(root / "proc/meminfo"))
    limit_bytes, used_bytes = _memory_limit(root)
    transparent = root / "sys/kernel/mm/transparent_hugepage"
    return SystemMemory(
        total_bytes=parse_kib(fields.get("MemTotal", "")),
        available_bytes=parse_kib(fields.get("MemAvailable", "")),
        cgroup_limit_bytes=limit_bytes,
        cgroup_used_bytes=used_bytes,
        huge_pages=int(fields.get("HugePages_Total", 0)),
        huge_page_bytes=parse_kib(fields.get("Hugepagesize", "")),
        transparent=parse_choice(_text(transparent / "enabled")),
        transparent_shared=parse_choice(_text(transparent / "shmem_enabled")),
    )


def read_numa_nodes(root: Path = _ROOT) -> tuple[NumaNode, ...]:
    """Returns the NUMA nodes by number; empty if the kernel has no NUMA support."""
    nodes = (_numa_node(folder) for folder in (root / "sys/devices/system/node").glob("node[0-9]*"))
    return tuple(sorted(nodes, key=lambda node: node.node))


def _numa_node(folder: Path) -> NumaNode:
    number = int(folder.name.removeprefix("node"))
    fields = parse_fields(_text(folder / "meminfo"))
    return NumaNode(
        node=number,
        cores=parse_cores(_text(folder / "cpulist")),
        memory_bytes=parse_kib(fields.get(f"Node {number} MemTotal", "")),
        distances=tuple(map(int, _text(folder / "distance").split())),
        initiators=_initiators(folder),
        access=_memory_access(folder),
    )


# Classes of best initiators: the first class contains only processors, the second also other requesters.
_ACCESS_CLASSES = ("access1/initiators", "access0/initiators")


def _initiators(folder: Path) -> tuple[int, ...]:
    for each in _ACCESS_CLASSES:
        if found := [int(link.name.removeprefix("node")) for link in (folder / each).glob("node[0-9]*")]:
            return tuple(sorted(found))
    return ()


def _memory_access(folder: Path) -> MemoryAccess:
    said = (_said_of_access(folder / each) for each in _ACCESS_CLASSES)
    return next((each for each in said if each != MemoryAccess()), MemoryAccess())


def _said_of_access(folder: Path) -> MemoryAccess:
    def value(name: str, per_unit: float) -> float | None:
        text = _text(folder / name).strip()
        return int(text) / per_unit if text.isdecimal() and int(text) > 0 else None

    return MemoryAccess(
        read_latency_ns=value("read_latency", 1),
        write_latency_ns=value("write_latency", 1),
        read_gbytes_per_s=value("read_bandwidth", 1000),  # sysfs has MB/s
        write_gbytes_per_s=value("write_bandwidth", 1000),
    )


def nearest_cores(nodes: Sequence[NumaNode], node: int | None) -> tuple[int, ...]:
    """The processors nearest to a node's memory: its own, those from the firmware, or those at the least distance.

    Args:
        nodes: All online nodes, by number.
        node: Number of the node; the result is empty for None or a node that is not online.
    """
    home = next((each for each in nodes if each.node == node), None)
    if home is None:
        return ()
    named = tuple(core for each in nodes if each.node in home.initiators for core in each.cores)
    if home.cores or named:
        return home.cores or named
    if len(home.distances) != len(nodes):
        return ()
    far = [(distance, each) for distance, each in zip(home.distances, nodes, strict=True) if each.cores]
    least = min((distance for distance, _ in far), default=0)
    return tuple(core for distance, each in far if distance == least for core in each.cores)


def read_dax_devices(root: Path = _ROOT) -> tuple[DaxDevice, ...]:
    """Returns the DAX devices by name."""
    # Kernels before 5.1 list them as a class only.
    found = {
        folder.name: folder
        for folders in ("sys/class/dax", "sys/bus/dax/devices")
        for folder in (root / folders).glob("dax*")
    }
    return tuple(_dax_device(found[name], root) for name in sorted(found))


def _dax_device(folder: Path, root: Path) -> DaxDevice:
    node = _text(folder / "target_node").strip()
    return DaxDevice(
        name=folder.name,
        memory_bytes=int(_text(folder / "size") or 0),
        node=int(node) if node and int(node) >= 0 else None,
        is_file=(root / "dev" / folder.name).exists(),
        is_system_ram=(folder / "driver").resolve().name == "kmem",
    )


def read_limits() -> tuple[Limit, ...]:
    """Returns this process's limits that a job can reach: open files, locked memory, core dumps."""
    names = {
        "nofile": resource.RLIMIT_NOFILE,
        "memlock": resource.RLIMIT_MEMLOCK,
        "core": resource.RLIMIT_CORE,
    }
    return tuple(_limit(name, *resource.getrlimit(number)) for name, number in names.items())


def _limit(name: str, soft: int, hard: int) -> Limit:
    return Limit(name=name, soft=_finite(soft), hard=_finite(hard))


def _finite(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def parse_fields(text: str) -> dict[str, str]:
    """Reads lines of "name: value"; the first of equal names counts."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def parse_kib(text: str) -> int:
    """Reads "24684084 kB" as bytes; anything else is 0."""
    match = re.fullmatch(r"\s*(\d+)\s*kB\s*", text)
    return int(match.group(1)) * 1024 if match else 0


def parse_choice(text: str) -> str:
    """Returns the selected choice of "always [madvise] never"; "" if none is selected."""
    match = re.search(r"\[([\w-]+)\]", text)
    return match.group(1) if match else ""


def parse_cores(text: str) -> tuple[int, ...]:
    """Reads a list of cores, such as "0-3,8"."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def parse_cpu_max(text: str) -> float | None:
    """Reads cgroup v2's cpu.max, "150000 100000", as 1.5 cores; None for no quota."""
    match = re.fullmatch(r"\s*(\d+)\s+(\d+)\s*", text)
    return int(match.group(1)) / int(match.group(2)) if match else None


def parse_limit_bytes(text: str) -> int | None:
    """Reads a cgroup's memory limit, of either cgroup version; None for no limit."""
    number = text.strip()
    return int(number) if number.isdecimal() and int(number) < _UNLIMITED_BYTES else None


def parse_cgroups(text: str) -> dict[str, str]:
    """Reads /proc/self/cgroup: the path by controller; "" stands for the unified hierarchy."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's cgroup and its ancestors, for both versions of cgroups.

    Some of these folders may not exist: a container often sees its own cgroup as the top.
    """
    paths = parse_cgroups(_text(root / "proc/self/cgroup"))
    mount = root / "sys/fs/cgroup"
    for top, path in ((mount, paths.get("")), (mount / controller, paths.get(controller))):
        folder = top / (path or "").strip("/")
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _quota_cores(root: Path) -> float | None:
    quotas: list[float] = []
    for folder in _cgroup_folders(root, "cpu"):
        old_style = (
            f"{_text(folder / 'cpu.cfs_quota_us').strip()} {_text(folder / 'cpu.cfs_period_us').strip()}"
        )
        found = (parse_cpu_max(_text(folder / "cpu.max")), parse_cpu_max(old_style))
        quotas.extend(quota for quota in found if quota is not None)
    return min(quotas, default=None)


@dataclass(frozen=True, slots=True)
class _MemoryGroup:
    """A cgroup that limits memory."""

    limit_bytes: int
    used_bytes: int | None
    cached_bytes: int
    """Cached file pages that have not been used recently: the kernel drops them before it kills processes."""

    @property
    def available_bytes(self) -> int:
        return self.limit_bytes - (self.used_bytes or 0) + self.cached_bytes


def read_cgroup_available_bytes(root: Path = _ROOT) -> int | None:
    """The least memory that this process's cgroup and its ancestors still allow; None without a limit."""
    available = [group.available_bytes for group in _memory_groups(root)]
    return max(0, min(available)) if available else None


def _memory_limit(root: Path) -> tuple[int | None, int | None]:
    tightest = min(_memory_groups(root), key=lambda group: group.limit_bytes, default=None)
    return (None, None) if tightest is None else (tightest.limit_bytes, tightest.used_bytes)


def _memory_groups(root: Path) -> Iterator[_MemoryGroup]:
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, used_name, cached_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit_bytes = parse_limit_bytes(_text(folder / limit_name))
            if limit_bytes is None:
                continue
            yield _MemoryGroup(
                limit_bytes=limit_bytes,
                used_bytes=parse_limit_bytes(_text(folder / used_name)),
                cached_bytes=_count(folder / "memory.stat", cached_name),
            )


def read_out_of_memory_kills(root: Path = _ROOT) -> tuple[int, int]:
    """Numbers of processes that the kernel has killed so far because memory ran out: in this process's cgroup and its
    ancestors, and on the whole machine."""
    names = ("memory.events", "memory.oom_control")
    files = [folder / name for folder in _cgroup_folders(root, "memory") for name in names]
    counts = [_count(path, "oom_kill") for path in files]
    return sum(counts), _count(root / "proc/vmstat", "oom_kill")


def _count(path: Path, name: str) -> int:
    """Reads a file of lines "name count"."""
    return next((int(line.split()[1]) for line in _text(path).splitlines() if line.startswith(f"{name} ")), 0)


def _text(path: Path) -> str:
    """Returns a file's text; "" if the file does not exist or the kernel refuses access."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_gpus(root: Path = _ROOT) -> tuple[tuple[Gpu, ...], str]:
    """Returns the NVIDIA GPUs that respond, and why GPUs are missing; "" if all respond.

    Uses NVML through the package nvidia-ml-py.
    """
    try:
        import pynvml
    except ImportError:
        return (), "nvidia-ml-py is not installed (pip install 'coarse-train[gpu]'): GPUs cannot be detected"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    try:
        return _nvml_gpus(pynvml, root)
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


def _nvml_node(nvml: Any, device: Any, root: Path) -> int | None:
    return read_pci_node(normal_bus_id(nvml.nvmlDeviceGetPciInfo(device).busId), root)


def _nvml_gpus(nvml: Any, root: Path) -> tuple[tuple[Gpu, ...], str]:
    driver = nvml.nvmlSystemGetDriverVersion()
    gpus: list[Gpu] = []
    lost: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(
                Gpu(
                    name=nvml.nvmlDeviceGetName(device),
                    memory_bytes=nvml.nvmlDeviceGetMemoryInfo(device).total,
                    driver=driver,
                    node=_nvml_node(nvml, device, root),
                )
            )
        except nvml.NVMLError as error:
            # One GPU that has dropped off the bus must not hide the others.
            lost.append(f"GPU {index}: {error}")
    return tuple(gpus), "; ".join(lost)

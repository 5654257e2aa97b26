"""The places of this machine's GPUs (switches, NUMA nodes, NVLink), and pairs of workers and memory devices.

The data comes from NVML (package nvidia-ml-py). `pair_gpus` is a pure function of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coarse.errors import CoarseError
from coarse.machine.pci import normal_bus_id, read_pci_node

if TYPE_CHECKING:
    from coarse.machine.host import NumaNode


class Distance(IntEnum):
    """The nearest common ancestor of two GPUs, nearest first: NVML's nvmlGpuTopologyLevel_t."""

    SAME = 0
    """One GPU, or one board."""
    SWITCH = 10
    """One PCIe switch."""
    SWITCHES = 20
    """Several PCIe switches, no host bridge."""
    HOST_BRIDGE = 30
    """A host bridge."""
    NUMA_NODE = 40
    """Several host bridges of one NUMA node."""
    SYSTEM = 50
    """Only the links between NUMA nodes."""

    def __str__(self) -> str:
        return _WORDS[self]


_WORDS = {
    Distance.SAME: "same board",
    Distance.SWITCH: "one switch",
    Distance.SWITCHES: "several switches",
    Distance.HOST_BRIDGE: "host bridge",
    Distance.NUMA_NODE: "NUMA node",
    Distance.SYSTEM: "between NUMA nodes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlace:
    """One GPU.

    Args:
        name: Model of the GPU.
        uuid: In the form of nvidia-smi. CUDA, which numbers GPUs in its own order, uses it too.
        bus_id: PCI bus id in the form of sysfs, such as "0000:17:00.0".
        numa_node: NUMA node of the nearest memory; None if the system does not report it.
    """

    name: str
    uuid: str
    bus_id: str
    numa_node: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTopology:
    """The GPUs of a machine in NVML's order, which is that of their bus ids. Immutable.

    Args:
        gpus: All of them.
        distances: Distance of each pair of GPUs; symmetric.
        nvlinks: Number of direct NVLinks of each pair of GPUs; symmetric. Links to an NVSwitch, which reaches all
            GPUs, count for every pair of GPUs with such links.

    Raises:
        ValueError: If the tables do not fit the GPUs, or are not symmetric.
    """

    gpus: tuple[GpuPlace, ...]
    distances: tuple[tuple[Distance, ...], ...]
    nvlinks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        numbers = range(len(self.gpus))
        for what, table in (("distances", self.distances), ("nvlinks", self.nvlinks)):
            if [len(row) for row in table] != [len(self.gpus)] * len(self.gpus):
                raise ValueError(f"{what} are not a square matrix for {len(self.gpus)} GPUs")
            for one in numbers:
                for other in numbers:
                    if table[one][other] != table[other][one]:
                        raise ValueError(f"{what} between GPUs {one} and {other} differ by direction")

    def find(self, uuid: str) -> int:
        """The number of a GPU.

        Raises:
            ValueError: If no GPU has this UUID.
        """
        for number, gpu in enumerate(self.gpus):
            if gpu.uuid == uuid:
                return number
        raise ValueError(f"NVML has no GPU {uuid}")


def pair_gpus(
    topology: GpuTopology, workers: Sequence[int], devices: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The workers that each memory device on a GPU serves: the nearest ones, by pair_nearest().

    A GPU may be both worker and memory device, and may occur several times in a list.

    Args:
        topology: Topology of all listed GPUs.
        workers: GPUs by local rank.
        devices: GPUs by number of the memory device.

    Returns:
        Local ranks by memory device, ascending.

    Raises:
        ValueError: If `devices` is empty, or a GPU does not exist.
    """
    for gpu in (*workers, *devices):
        if not 0 <= gpu < len(topology.gpus):
            raise ValueError(f"GPU {gpu} is not one of the {len(topology.gpus)} GPUs of this machine")
    return pair_nearest(
        [[topology.distances[gpu][device] for device in devices] for gpu in workers], len(devices)
    )


def pair_nearest(distances: Sequence[Sequence[int]], num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The workers that each memory device serves: the nearest ones, as evenly as possible.

    Pairs the nearest first. In a tree of switches and bridges, this leaves as few pairs as possible for every larger
    distance. Ties go to the lower numbers.

    Args:
        distances: Distances by worker and memory device.
        num_devices: Number of memory devices.

    Returns:
        Local ranks by memory device, ascending.

    Raises:
        ValueError: If `num_devices` is 0.
    """
    if num_devices < 1:
        raise ValueError("workers need at least one memory device")
    pairs = sorted(
        (distance, rank, device) for rank, row in enumerate(distances) for device, distance in enumerate(row)
    )
    served: list[list[int]] = [[] for _ in range(num_devices)]
    unserved = set(range(len(distances)))
    most, num_longer = divmod(len(distances), num_devices)
    for _, rank, device in pairs:
        is_room = len(served[device]) < most or (len(served[device]) == most and num_longer > 0)
        if rank in unserved and is_room:
            num_longer -= len(served[device]) == most
            served[device].append(rank)
            unserved.remove(rank)
    return tuple(tuple(sorted(ranks)) for ranks in served)


def workers_of_gpus(
    topology: GpuTopology, uuids: Sequence[str], *, devices: Sequence[int], num_workers: int
) -> tuple[tuple[int, ...], ...]:
    """The default workers of each memory device: pair_gpus(), with workers on gpus_of_workers().

    Args:
        topology: Topology of this machine.
        uuids: UUIDs of the GPUs that this process sees, in CUDA's order.
        devices: Ordinals of the memory devices' GPUs.
        num_workers: Number of workers on this node.

    Raises:
        ValueError: As for GpuTopology.find() and pair_gpus(), or if CUDA does not see a GPU.
    """
    unknown = [device for device in devices if not 0 <= device < len(uuids)]
    if unknown:
        raise ValueError(f"there is no GPU cuda:{unknown[0]}: CUDA finds {len(uuids)} in this process")
    numbers = [topology.find(uuid) for uuid in uuids]
    return pair_gpus(
        topology,
        workers=gpus_of_workers(numbers, [numbers[device] for device in devices], num_workers),
        devices=[numbers[device] for device in devices],
    )


def gpus_of_workers(gpus: Sequence[int], taken: Collection[int], num_workers: int) -> list[int]:
    """The assumed GPU of each worker: local rank r uses the r-th GPU, as is usual with launchers.

    GPUs of memory devices are excluded if the others are enough for all workers. With more ranks than GPUs, the
    assignment starts again at the first GPU.

    Args:
        gpus: GPUs that workers may use.
        taken: GPUs of memory devices.
        num_workers: Number of workers on this node.
    """
    free = [gpu for gpu in gpus if gpu not in taken]
    chosen = free if len(free) >= num_workers else gpus
    return [chosen[rank % len(chosen)] for rank in range(num_workers)]


def workers_of_nodes(
    topology: GpuTopology,
    uuids: Sequence[str],
    nodes: Sequence[NumaNode],
    *,
    devices: Sequence[int],
    num_workers: int,
) -> tuple[tuple[int, ...], ...]:
    """Like workers_of_gpus(), for memory devices on NUMA nodes, by the kernel's distances to the GPUs' nodes.

    Args:
        topology, uuids, num_workers: As for workers_of_gpus().
        nodes: The NUMA nodes of this machine.
        devices: Number of each memory device's node.

    Raises:
        ValueError: As for GpuTopology.find(), or if the system does not report a GPU's node or the nodes' distances.
    """
    online = [node.node for node in nodes]
    distances = {node.node: dict(zip(online, node.distances, strict=False)) for node in nodes}

    def distance(uuid: str, device: int) -> int:
        place = topology.gpus[topology.find(uuid)]
        if place.numa_node is None or device not in distances.get(place.numa_node, {}):
            raise ValueError(
                f"the system does not report the distance between {place.name} ({place.bus_id}) and NUMA node "
                f"{device}"
            )
        return distances[place.numa_node][device]

    of_workers = gpus_of_workers(range(len(uuids)), (), num_workers)
    return pair_nearest(
        [[distance(uuids[gpu], device) for device in devices] for gpu in of_workers], len(devices)
    )


def read_gpu_topology(root: Path = Path("/")) -> GpuTopology:
    """Reads the topology of this machine from NVML.

    Raises:
        CoarseError: If NVML is absent or does not answer; names the package to install.
    """
    try:
        import pynvml
    except ImportError:
        raise CoarseError(
            "nvidia-ml-py is not installed (pip install 'coarse-train[gpu]'): GPUs cannot be detected"
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise CoarseError(f"NVML: {error}") from None
    try:
        return topology_of(pynvml, root)
    except pynvml.NVMLError as error:
        raise CoarseError(f"NVML: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def is_nvlink_disabled(root: Path = Path("/")) -> bool:
    """Whether NVLink is disabled in NVIDIA's driver (NVreg_NvLinkDisable=1); changing that needs a reboot."""
    try:
        parameters = (root / "proc/driver/nvidia/params").read_text(errors="replace")
    except OSError:
        return False
    return "NvLinkDisable: 1" in parameters.splitlines()


def topology_of(nvml: Any, root: Path) -> GpuTopology:
    """The topology from an initialised `pynvml`, or a compatible object, and sysfs below `root`."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    bus_ids = [_bus_id(nvml, handle) for handle in handles]
    numbers = range(len(handles))
    return GpuTopology(
        gpus=tuple(
            GpuPlace(
                name=_text(nvml.nvmlDeviceGetName(handle)),
                uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                bus_id=bus_id,
                numa_node=read_pci_node(bus_id, root),
            )
            for handle, bus_id in zip(handles, bus_ids, strict=True)
        ),
        distances=tuple(
            tuple(_distance(nvml, handles[one], handles[other]) for other in numbers) for one in numbers
        ),
        nvlinks=_nvlinks(nvml, handles, bus_ids),
    )


def _bus_id(nvml: Any, handle: Any) -> str:
    return normal_bus_id(nvml.nvmlDeviceGetPciInfo(handle).busId)


def _text(answer: str | bytes) -> str:
    """NVML's text as str: some versions of nvidia-ml-py return bytes."""
    return answer.decode() if isinstance(answer, bytes) else answer


def _distance(nvml: Any, one: Any, other: Any) -> Distance:
    if one is other:
        return Distance.SAME
    return Distance(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))


def _nvlinks(nvml: Any, handles: Sequence[Any], bus_ids: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Links by their far ends: another GPU, or a switch; all GPUs with links to switches are assumed to share one."""
    direct = [[0] * len(handles) for _ in handles]
    to_switches = [0] * len(handles)
    for number, handle in enumerate(handles):
        for far_end in _far_ends(nvml, handle):
            if far_end in bus_ids:
                direct[number][bus_ids.index(far_end)] += 1
            elif far_end == _SWITCH:
                to_switches[number] += 1
    numbers = range(len(handles))
    return tuple(
        tuple(
            0
            if one == other
            else max(direct[one][other], direct[other][one]) + min(to_switches[one], to_switches[other])
            for other in numbers
        )
        for one in numbers
    )


_SWITCH = "switch"


def _far_ends(nvml: Any, handle: Any) -> list[str]:
    """The far ends of a GPU's active NVLinks: _SWITCH, or the bus id of a GPU, visible here or not."""
    ends: list[str] = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(nvml.NVMLError):  # the link does not exist or is not in use
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                ends.append(_far_end(nvml, handle, link))
    return ends


def _far_end(nvml: Any, handle: Any, link: int) -> str:
    """The far end of one link. If the driver does not report its kind, an end without bus id counts as a switch."""
    try:
        if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return _SWITCH
        return normal_bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
    except nvml.NVMLError:
        return _SWITCH

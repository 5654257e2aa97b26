"""The algorithms that a session's memory devices support, and those among which measurements choose."""

from __future__ import annotations

from itertools import combinations, pairwise

from coarse.env import may_share_gpus_over_nccl
from coarse.kernels import _native
from coarse.kernels.nccl import describe, find_nccl
from coarse.machine.partition_table import PartitionTable
from coarse.settings import Settings

DIRECT, RING, EXCHANGE, NCCL = "direct", "ring", "exchange", "nccl"

_SHARES_GPUS = (2, 30, 0)
"""The first version of NCCL that supports several ranks on one GPU."""


def algorithms_of(settings: Settings, table: PartitionTable, *, num_nodes: int = 1) -> tuple[str, ...]:
    """The algorithms for which a node's memory devices are set up; the first is the default.

    Omits algorithms that need no setup. Only GPUs offer a choice: a measurement finds the fastest algorithm over
    their links (coarse.client.gpu.algorithm_choice). The host's memory is a single memory, which sync cores read and
    write in place.

    Args:
        settings: The session's settings.
        table: The session's memory devices.
        num_nodes: Number of nodes of the job. Transfers between nodes start and end in the memory device of a shard.
    """
    if settings.sync_algorithm != "auto":
        return (settings.sync_algorithm,)
    if len(set(table.memories)) == 1 or not table.is_on_gpus or settings.keep_devices or num_nodes > 1:
        return (DIRECT,)
    has_nccl = not _nccl_problem(table)
    return (EXCHANGE, DIRECT, RING, *((NCCL,) if has_nccl else ()))


def measures_gpu_links(settings: Settings, table: PartitionTable, *, num_nodes: int = 1) -> bool:
    """Whether a session measures the links between its workers' GPUs and those of its memory devices.

    Not with kept devices, whose groups are found again by their location and their shards, whatever the links do.

    Args:
        settings, table, num_nodes: As for algorithms_of().
    """
    return table.is_on_gpus and num_nodes == 1 and not (settings.machine or settings.keep_devices)


def routable_algorithms(settings: Settings, table: PartitionTable, *, num_nodes: int = 1) -> tuple[str, ...]:
    """Those of algorithms_of() that allow slots on other memory devices than the workers' own.

    If slots lie on GPUs, pushes cross different links; in the host's memory they cross none. Rings and NCCL take each
    contribution from the worker's own memory device.

    Args:
        settings, table, num_nodes: As for algorithms_of().
    """
    if settings.routing == "local" or len(set(table.memories)) == 1:
        return ()
    if not measures_gpu_links(settings, table, num_nodes=num_nodes):
        return ()
    return tuple(each for each in algorithms_of(settings, table) if each in (EXCHANGE, DIRECT))


def describe_algorithm(settings: Settings, table: PartitionTable, *, num_nodes: int = 1) -> str:
    """The algorithm of a session's tensors and its reason, in words.

    Args:
        settings, table, num_nodes: As for algorithms_of().
    """
    if settings.machine and num_nodes > 1:
        return f"algorithm: {settings.sync_algorithm}, the one that emulated links carry to other nodes"
    if settings.algorithm != "auto":
        return f"algorithm: {settings.algorithm}, set by COARSE_ALGORITHM"
    if settings.machine:
        return f"algorithm: {settings.sync_algorithm}, the default on emulated machines"
    found = algorithms_of(settings, table, num_nodes=num_nodes)
    small = f"gather for tensors of up to {settings.gather_bytes} bytes"
    if len(found) == 1:
        return f"algorithm: {small}, {found[0]} for larger ones"
    return f"algorithm: {small}, for larger ones the fastest of {', '.join(found)}, measured at their registration"


def describe_compression(settings: Settings, *, num_nodes: int) -> str:
    """How gradients travel between nodes, in words; "" if COARSE_NODE_COMPRESSION says nothing.

    Args:
        settings, num_nodes: As for algorithms_of().
    """
    compression = settings.node_compression
    if compression == "none":
        return ""
    if num_nodes == 1:
        return (
            f"compression between nodes: none: COARSE_NODE_COMPRESSION={compression}, but there is one node"
        )
    return f"compression between nodes: float32 gradients as {compression}, set by COARSE_NODE_COMPRESSION"


def distant_gpus(table: PartitionTable) -> list[str]:
    """Pairs of GPUs with memory devices that cannot reach each other's memory, as "cuda:0 and cuda:1"."""
    if not table.is_on_gpus:
        return []
    gpus = sorted({int(device.memory.place) for device in table.devices})
    return [
        f"cuda:{gpu} and cuda:{other}"
        for gpu, other in combinations(gpus, 2)
        if not (_native.cuda_can_access_peer(gpu, other) and _native.cuda_can_access_peer(other, gpu))
    ]


def check_nccl(table: PartitionTable) -> None:
    """Raises ValueError, with advice, unless NCCL can reduce between these memory devices."""
    if problem := _nccl_problem(table):
        raise ValueError(f"COARSE_ALGORITHM=nccl: {problem}")


def _nccl_problem(table: PartitionTable) -> str:
    if not table.is_on_gpus:
        return (
            f"memory devices are in {', '.join(table.memories)}, but NCCL reduces between GPUs only; choose "
            "another algorithm, or COARSE_MEMORY_DEVICES=cuda:0,cuda:1"
        )
    try:
        library = find_nccl()
    except _native.NcclError as error:
        return str(error)
    in_order = sorted((memory, device) for device, memory in enumerate(table.memories))
    for (memory, first), (other, second) in pairwise(in_order):
        shares = library.version >= _SHARES_GPUS and may_share_gpus_over_nccl()
        if memory == other and not shares:
            return (
                f"memory devices {first} and {second} are both on {memory}, which {describe(library)} refuses; "
                "NCCL 2.30 and later supports it with NCCL_MULTI_RANK_GPU_ENABLE=1. Give each its own GPU, or "
                "choose another algorithm"
            )
    return ""

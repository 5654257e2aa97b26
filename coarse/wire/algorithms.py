"""By which algorithms the memory devices of a session can reduce, and those from which measuring chooses."""

from __future__ import annotations

from itertools import combinations, pairwise

from coarse.env import may_share_gpus_over_nccl
from coarse.kernels import _native
from coarse.kernels.nccl import describe, find_nccl
from coarse.machine.partition_table import PartitionTable
from coarse.settings import Settings

DIRECT, RING, EXCHANGE, NCCL = "direct", "ring", "exchange", "nccl"

_SHARES_GPUS = (2, 30, 0)
"""The first version of NCCL that takes several ranks on one GPU."""


def algorithms_of(settings: Settings, table: PartitionTable, *, num_nodes: int = 1) -> tuple[str, ...]:
    """Those for which the memory devices of a node are set up, besides what needs nothing; the first is the default.

    There is a choice between GPUs alone: what is fastest over their links is to be measured
    (coarse.client.gpu.algorithm_choice). The host's memory is one, which sync cores read and write in place.

    Args:
        settings: Of the session.
        table: Its memory devices.
        num_nodes: Of the job; what goes between those begins and ends in the one memory device that has a shard.
    """
    if settings.sync_algorithm != "auto":
        return (settings.sync_algorithm,)
    if len(set(table.memories)) == 1 or not table.is_on_gpus or settings.keep_devices or num_nodes > 1:
        return (DIRECT,)
    has_nccl = not _nccl_problem(table)
    return (EXCHANGE, DIRECT, RING, *((NCCL,) if has_nccl else ()))


def routable_algorithms(settings: Settings, table: PartitionTable, *, num_nodes: int = 1) -> tuple[str, ...]:
    """Those of algorithms_of() by which slots may lie with other memory devices than the workers' own.

    Where GPUs have the slots, what a worker pushes crosses links that differ; in the host's memory none. Rings and
    NCCL take each contribution from its own memory device. Kept groups are found again by where they lie.

    Args:
        settings, table, num_nodes: As for algorithms_of().
    """
    are_links_alike = not table.is_on_gpus or len(set(table.memories)) == 1
    is_local = settings.routing == "local" or num_nodes > 1
    if are_links_alike or settings.machine or settings.keep_devices or is_local:
        return ()
    return tuple(each for each in algorithms_of(settings, table) if each in (EXCHANGE, DIRECT))


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
    """Raises ValueError unless NCCL can reduce between these memory devices; says what to do."""
    if problem := _nccl_problem(table):
        raise ValueError(f"COARSE_ALGORITHM=nccl: {problem}")


def _nccl_problem(table: PartitionTable) -> str:
    if not table.is_on_gpus:
        return (
            f"memory devices are in {', '.join(table.memories)}, and NCCL reduces between GPUs; choose another "
            "algorithm, or COARSE_MEMORY_DEVICES=cuda:0,cuda:1"
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
                f"memory devices {first} and {second} are both on {memory}, which {describe(library)} refuses; 2.30 "
                "and later can with NCCL_MULTI_RANK_GPU_ENABLE=1. Give each a GPU of its own, or choose another "
                "algorithm"
            )
    return ""

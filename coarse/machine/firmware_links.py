"""Links to memories on NUMA nodes as the firmware describes them (ACPI's HMAT), before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence

from coarse.machine.host import MemoryAccess, NumaNode
from coarse.machine.links import Bucket, LinkTable, Path
from coarse.machine.partition_table import PartitionTable

HOST = "host"
_NS_PER_US = 1e3


def firmware_links(table: PartitionTable, nodes: Sequence[NumaNode]) -> LinkTable | None:
    """Paths that end, or begin, in the memories of a partition table.

    A push writes to the memory device's memory and a pull reads it. What one memory device, or worker, sends to
    another is read where the sender's slots lie, and between memory devices written where the target's lie. Reads of
    one node share its read bandwidth, writes its write bandwidth. A pure function: all workers of a machine come to
    the same.

    Args:
        table: Whom each memory device serves, and what it owns.
        nodes: Of this machine.

    Returns:
        None unless every memory is a NUMA node's, and the firmware gives latency and bandwidth of each, both ways.
    """
    said = {f"numa:{node.node}": node.access for node in nodes if _is_complete(node.access)}
    names = sorted(set(table.memories))
    if not said.keys() >= set(names):
        return None
    buckets = [
        Bucket(name=f"{name} {way}", gbytes_per_s=rate or 0.0)
        for name in names
        for way, rate in (
            ("reads", said[name].read_gbytes_per_s),
            ("writes", said[name].write_gbytes_per_s),
        )
    ]
    workers = [table.memories[table.local_device(worker)] for worker in range(table.num_workers)]
    memories = [*workers, *table.memories]

    def path(source: int, target: int) -> Path | None:
        if source == target:
            return None
        from_device, to_device = source >= len(workers), target >= len(workers)
        used: list[int] = []
        latency_ns = 0.0
        if from_device or not to_device:
            used.append(2 * names.index(memories[source]))
            latency_ns += said[memories[source]].read_latency_ns or 0.0
        if to_device:
            used.append(2 * names.index(memories[target]) + 1)
            latency_ns += said[memories[target]].write_latency_ns or 0.0
        return Path(latency_us=latency_ns / _NS_PER_US, buckets=tuple(used))

    endpoints = range(len(memories))
    return LinkTable(
        machine=HOST,
        num_workers=table.num_workers,
        num_devices=table.num_devices,
        buckets=tuple(buckets),
        paths=tuple(tuple(path(source, target) for target in endpoints) for source in endpoints),
    )


def _is_complete(access: MemoryAccess) -> bool:
    figures = (
        access.read_latency_ns,
        access.write_latency_ns,
        access.read_gbytes_per_s,
        access.write_gbytes_per_s,
    )
    return all(figure is not None for figure in figures)

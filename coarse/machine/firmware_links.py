"""Links to memories on NUMA nodes from firmware data (ACPI's HMAT), for use before measurements."""

from __future__ import annotations

from collections.abc import Sequence

from coarse.machine.host import MemoryAccess, NumaNode
from coarse.machine.links import Bucket, LinkTable, Path
from coarse.machine.partition_table import PartitionTable

HOST = "host"
_NS_PER_US = 1e3


def firmware_links(table: PartitionTable, nodes: Sequence[NumaNode]) -> LinkTable | None:
    """Paths that start or end in the memories of a partition table.

    A push writes to the memory device's memory, and a pull reads it. A transfer from one memory device or worker to
    another reads the memory of the sender's slots; between memory devices it also writes the memory of the target's
    slots. Reads of one node share its read bandwidth; writes share its write bandwidth. A pure function: all workers
    of a machine get the same result.

    Args:
        table: The workers and the memory of each memory device.
        nodes: The NUMA nodes of this machine.

    Returns:
        None unless every memory is a NUMA node's and the firmware gives latency and bandwidth of each, both ways.
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

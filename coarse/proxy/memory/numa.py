"""Device memory on NUMA nodes: CXL memory managed by Linux is a NUMA node without cores (docs/devices.md)."""

from __future__ import annotations

import errno
import mmap
import re
from collections.abc import Mapping
from pathlib import Path

from coarse.errors import OutOfDeviceMemoryError
from coarse.kernels import _native
from coarse.machine.host import (
    NumaNode,
    nearest_cores,
    parse_cores,
    parse_fields,
    parse_kib,
    read_numa_nodes,
)
from coarse.wire.host_memory import RESERVE_BYTES, memory_name, refused, within_cgroup
from coarse.wire.segments import Segment

_PAGE_BYTES = mmap.PAGESIZE  # the unit of numa_maps, where a huge page counts as many small ones


class NumaMemory:
    """Sealed memfds whose pages all lie on one NUMA node, or are interleaved over several; verifies their places.

    Args:
        nodes: Numbers of the NUMA nodes.

    Raises:
        ValueError: If this machine has no such node, or the node has no memory, or this process may not use it.
    """

    kind = "numa"
    is_mappable = True
    takes_pages_later = False
    message_bytes = _native.HOST_MESSAGE_BYTES

    def __init__(self, *nodes: int) -> None:
        self.nodes = nodes
        self.num_places = len(nodes)
        self._found = read_numa_nodes()
        for node in nodes:
            _check_node(node, self._found, _allowed_nodes())

    def allocate(self, label: str, num_bytes: int) -> Segment:
        available = self.available_bytes()
        if num_bytes > available:  # the kernel would kill processes instead of failing
            raise OutOfDeviceMemoryError(self._shortage(label, num_bytes, available))
        segment = self._bind(label, num_bytes, is_allocated=True)
        try:
            self._verify(label, segment)
        except BaseException:
            segment.close()
            raise
        return segment

    def allocate_host(self, label: str, num_bytes: int) -> Segment:
        return self.allocate(label, num_bytes)

    def allocate_sparse(self, label: str, num_bytes: int) -> Segment:
        return self._bind(label, num_bytes, is_allocated=False)

    def available_bytes(self) -> int:
        # With interleaving, the first full node is the limit.
        return within_cgroup(self.num_places * min(map(_available_on, self.nodes)))

    def cores(self) -> tuple[int, ...]:
        return nearest_cores(self._found, self.nodes[0])

    def tensor_memory(self) -> None:
        return None

    def snapshot_pool(self, plan: _native.GroupPlan) -> None:
        return None

    def close(self) -> None:
        """Does nothing: memory is freed with its segments."""

    def _bind(self, label: str, num_bytes: int, *, is_allocated: bool) -> Segment:
        try:
            fd = _native.create_bound_memory(memory_name(label), num_bytes, self.nodes, is_allocated)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS):
                raise OutOfDeviceMemoryError(
                    f"{label}: this process may not say on which NUMA node its memory lies (mbind: "
                    f"{error.strerror}). In a container: docker run --cap-add SYS_NICE"
                ) from error
            shortage = self._shortage(label, num_bytes, self.available_bytes())
            raise refused(error, label, num_bytes, shortage) from error
        return Segment(fd, num_bytes)

    def _verify(self, label: str, segment: Segment) -> None:
        mapping = _native.Mapping(segment.region, segment.num_bytes, read_only=True)
        mapping.populate()  # numa_maps counts mapped pages
        pages = parse_numa_maps(Path("/proc/self/numa_maps").read_text(), mapping.address)
        expected = -(-segment.num_bytes // _PAGE_BYTES)
        if not set(pages) <= set(self.nodes) or sum(pages.values()) < expected:
            found = ", ".join(f"{count} on node {node}" for node, count in sorted(pages.items())) or "none"
            raise OutOfDeviceMemoryError(
                f"{label}: {expected} pages were asked of {self.name}, and there are {found}"
            )

    @property
    def name(self) -> str:
        return f"NUMA node{'s' if self.num_places > 1 else ''} {' and '.join(map(str, self.nodes))}"

    def _shortage(self, label: str, num_bytes: int, available: int) -> str:
        return (
            f"{label} needs {num_bytes / 2**20:.1f} MiB of {self.name}, {available / 2**20:.1f} MiB are "
            "available there. Use fewer workers, a smaller model, or memory devices on several nodes."
        )


def _available_on(node: int) -> int:
    fields = parse_fields(Path(f"/sys/devices/system/node/node{node}/meminfo").read_text())

    def num_bytes(name: str) -> int:
        return parse_kib(fields.get(f"Node {node} {name}", ""))

    # Half of the memory of cached files, like the kernel's own estimate for all nodes, which also leaves some.
    cached = num_bytes("Active(file)") + num_bytes("Inactive(file)") + num_bytes("SReclaimable")
    return max(0, num_bytes("MemFree") + cached // 2 - RESERVE_BYTES)


def parse_numa_maps(text: str, address: int) -> dict[int, int]:
    """Reads /proc/PID/numa_maps: pages by node of the mapping that starts at `address`; empty if none does."""
    for line in text.splitlines():
        begin, _, rest = line.partition(" ")
        if int(begin, 16) == address:
            return {int(node): int(count) for node, count in re.findall(r"\bN(\d+)=(\d+)", rest)}
    return {}


def _allowed_nodes() -> tuple[int, ...]:
    """The nodes whose memory this process may use: a control group can restrict them."""
    fields: Mapping[str, str] = parse_fields(Path("/proc/self/status").read_text())
    return parse_cores(fields.get("Mems_allowed_list", ""))


def _check_node(node: int, nodes: tuple[NumaNode, ...], allowed: tuple[int, ...]) -> None:
    found = {each.node: each for each in nodes}
    named = ", ".join(f"{each.node} ({each.memory_bytes / 2**30:.1f} GiB)" for each in nodes) or "none"
    if node not in found:
        raise ValueError(f"there is no NUMA node {node} on this machine; there are {named}")
    if found[node].memory_bytes == 0:
        raise ValueError(f"NUMA node {node} has no memory; there are {named}")
    if allowed and node not in allowed:
        raise ValueError(
            f"this process may not have memory of NUMA node {node}, only of {', '.join(map(str, allowed))}: its "
            "control group's cpuset.mems says so"
        )

"""Detects processes that the kernel killed because memory ran out, which it does not report to their parents."""

from __future__ import annotations

from pathlib import Path

from coarse.machine.host import read_memory, read_out_of_memory_kills


class OutOfMemoryWatch:
    """Detects processes that the kernel has killed for lack of memory since this object's creation.

    Args:
        root: Folder with /proc and /sys.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = read_out_of_memory_kills(root)

    def evidence(self) -> str:
        """Evidence for such kills, with advice; "" for none."""
        in_group, on_machine = read_out_of_memory_kills(self._root)
        if in_group > self._before[0]:
            limit = read_memory(self._root).cgroup_limit_bytes or 0
            return (
                "the kernel killed processes of this control group, which reached its memory limit of "
                f"{limit / 2**20:.0f} MiB: use fewer workers on this node, a smaller model or batch, or raise "
                "the limit"
            )
        if on_machine > self._before[1]:
            return (
                "the kernel killed processes because this machine ran out of memory: use fewer workers on "
                "this node, or a smaller model or batch"
            )
        return ""

"""Whether the kernel has killed processes because memory ran out, of which it does not tell their parents."""

from __future__ import annotations

from pathlib import Path

from coarse.machine.host import read_memory, read_out_of_memory_kills


class OutOfMemoryWatch:
    """Knows whether the kernel has killed processes for want of memory since this was made.

    Args:
        root: Where /proc and /sys are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = read_out_of_memory_kills(root)

    def evidence(self) -> str:
        """What speaks for it, and what to do then; "" if nothing does."""
        in_group, on_machine = read_out_of_memory_kills(self._root)
        if in_group > self._before[0]:
            limit = read_memory(self._root).cgroup_limit_bytes or 0
            return (
                f"the kernel has killed processes of this control group, which may have {limit / 2**20:.0f} MiB of "
                "memory and ran out: use fewer workers on this node, a smaller model or batch, or raise the limit"
            )
        if on_machine > self._before[1]:
            return (
                "the kernel has killed processes of this machine, which ran out of memory: use fewer workers on this "
                "node, or a smaller model or batch"
            )
        return ""

"""The values that a read may return: those that coherence allows."""

from __future__ import annotations

from collections.abc import Iterator

from coarse.simulator.studies.remote_data_cache.caches.protocol import Operation, System
from coarse.simulator.studies.remote_data_cache.caches.remote_cache import Coherence


def violations(system: System) -> Iterator[str]:
    """Reads of a system that returned a value older than allowed.

    Under hardware coherence a read may lack no write that ended before it began, and return no older value than an
    earlier read of its node that had ended. Under software coherence it may lack no write that ended before its
    kernel began.
    """
    order = _Order(system)
    for read in system.operations:
        if not read.is_write and read.ended >= 0:
            needed = order.newest_needed(read)
            if order.age(read.line, read.value) < order.age(read.line, needed):
                yield (
                    f"node {read.node}, stream {read.stream} read value {read.value} of line {read.line} in kernel "
                    f"{read.kernel}, after value {needed}"
                )


class _Order:
    """The order in which each line's home received writes."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._age = {
            (line, value): place + 1
            for home in system.homes
            for line, values in home.order.items()
            for place, value in enumerate(values)
        }

    def age(self, line: int, value: int) -> int:
        """Place of a value among those of its line; 0 for the first."""
        return self._age.get((line, value), 0)

    def newest_needed(self, read: Operation) -> int:
        """The newest value that a read must not lack."""
        needed = [each.value for each in self._system.operations if self._precedes(each, read)]
        return max(needed, key=lambda value: self.age(read.line, value), default=0)

    def _precedes(self, other: Operation, read: Operation) -> bool:
        if other.line != read.line or other.ended < 0:
            return False
        if self._system.coherence is Coherence.SOFTWARE:
            return other.is_write and other.ended < self._kernel_began(read)
        is_seen = other.is_write or other.node == read.node
        return is_seen and other.ended < read.began

    def _kernel_began(self, read: Operation) -> int:
        ends = self._system.kernel_ends.get(read.stream, [])
        return ends[read.kernel - 1] if read.kernel else 0

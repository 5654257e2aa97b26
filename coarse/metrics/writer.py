"""Counts events of a process in its block of shared memory."""

from __future__ import annotations

from coarse.kernels import _native
from coarse.metrics.declarations import DECLARATIONS, label_values


class MetricsWriter:
    """Writes metrics by name. Cheap, from any thread; not for what happens once per shard, which native code counts.

    Args:
        block: The block of this process; the default counts nothing.
    """

    def __init__(self, block: _native.MetricsBlock | None = None) -> None:
        self.block = block or _native.MetricsBlock()
        """The block, for native code."""
        self._is_on = block is not None

    def add(self, name: str, amount: int = 1, *, label: str = "") -> None:
        """Adds to a counter.

        Args:
            name: Name of the metric.
            amount: What to add; nanoseconds if it counts seconds.
            label: The value of its label, if it has one.
        """
        if self._is_on:
            self.block.add(DECLARATIONS[name].number, amount, _series(name, label))

    def set(self, name: str, value: int, *, label: str = "") -> None:
        """Sets a gauge; or a counter that something else counts, in nanoseconds if it counts seconds."""
        if self._is_on:
            self.block.set(DECLARATIONS[name].number, value, _series(name, label))

    def observe(self, name: str, seconds: float) -> None:
        """Adds a duration to a histogram."""
        if self._is_on:
            self.block.observe_ns(DECLARATIONS[name].number, round(seconds * 1e9))


def _series(name: str, value: str) -> int:
    if not value:
        return 0
    (label,) = DECLARATIONS[name].labels
    return label_values(label, 0).index(value)

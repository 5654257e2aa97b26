"""Counts events of a process in shared memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from coarse.kernels import _native
from coarse.metrics.declarations import DECLARATIONS, label_values


class MetricsWriter:
    """Writes metrics by name. Cheap, from any thread. Native code counts the events of each shard.

    Args:
        native: The metrics of this process; the default counts nothing.
    """

    def __init__(self, native: _native.ProcessMetrics | None = None) -> None:
        self.native = native or _native.ProcessMetrics()
        """The same for native code."""
        self._is_on = native is not None

    def add(self, name: str, amount: int = 1, *, label: str = "", device: int = 0) -> None:
        """Adds to a counter.

        Args:
            name: Name of the metric.
            amount: The increment; nanoseconds if the metric counts seconds.
            label: The value of its label, if it has one besides `device`.
            device: The number of the memory device, if it has that label.
        """
        if self._is_on:
            self.native.add(DECLARATIONS[name].number, amount, _series(name, label, device))

    def set(self, name: str, value: int, *, label: str = "") -> None:
        """Sets a gauge; or a counter that something else counts, in nanoseconds if it counts seconds."""
        if self._is_on:
            self.native.set(DECLARATIONS[name].number, value, _series(name, label))

    def observe(self, name: str, seconds: float, *, label: str = "") -> None:
        """Adds a duration to a histogram."""
        if self._is_on:
            self.native.observe_ns(DECLARATIONS[name].number, round(seconds * 1e9), _series(name, label))

    @contextlib.contextmanager
    def waiting_for_answer(self) -> Iterator[None]:
        """Counts the time of a `with` block as a wait for an answer of memory devices."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.observe("coarse_wait_seconds", time.monotonic() - began_s, label="request")


def _series(name: str, value: str, device: int = 0) -> int:
    """The number of a series: `device` is the first label of all metrics that have it."""
    if not value:
        return 0
    values = label_values(DECLARATIONS[name].labels[-1], 0)
    return device * len(values) + values.index(value)

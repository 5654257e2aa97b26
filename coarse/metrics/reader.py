"""Reads the metrics of a node's workers and memory devices from their shared memory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from coarse.kernels import _native
from coarse.metrics.declarations import DECLARATIONS, QUEUE_SHARDS, Declaration, device_label
from coarse.metrics.values import Family, Histogram, Metrics, Series


class MetricsReader:
    """Reads the metrics of a node's processes. Safe from any thread, and while processes write or end.

    Args:
        workers: The metrics of each worker, by rank.
        devices: The metrics of each memory device.
    """

    def __init__(
        self, workers: Mapping[int, _native.ProcessMetrics], devices: Sequence[_native.ProcessMetrics]
    ) -> None:
        self._num_devices = len(devices)
        self._processes = {
            "worker": {str(rank): process for rank, process in workers.items()},
            "device": {device_label(number): process for number, process in enumerate(devices)},
        }

    @classmethod
    def of_segment(cls, fd: int, num_devices: int, ranks: Sequence[int]) -> MetricsReader:
        """Maps the segment of a node.

        Args:
            fd: The segment; the caller closes it.
            num_devices: Memory devices of the node.
            ranks: Ranks of the node's workers, by client number.

        Raises:
            ValueError: If it is too small.
        """
        segment = _native.MetricsSegment(fd, num_devices, len(ranks))
        workers = {rank: segment.client(client) for client, rank in enumerate(ranks)}
        return cls(workers, [segment.device(device) for device in range(num_devices)])

    def worker(self, rank: int) -> _native.ProcessMetrics:
        """Where a worker of this node counts."""
        return self._processes["worker"][str(rank)]

    def read(self) -> Metrics:
        """The current values. Series with further labels that have counted nothing are left out."""
        taken_s = time.monotonic()
        families = {name: self._family(each) for name, each in DECLARATIONS.items() if name != QUEUE_SHARDS}
        families[QUEUE_SHARDS] = _queue_family(families)
        return Metrics([each for each in families.values() if each.series], taken_s)

    def _family(self, declaration: Declaration) -> Family:
        return Family(declaration, tuple(self._series(declaration)))

    def _series(self, declaration: Declaration) -> Iterator[Series]:
        all_labels = declaration.series(self._num_devices)
        for owner, process in self._processes[declaration.owner].items():
            cells = process.cells(declaration.number)
            width = len(cells) // max(1, len(all_labels))
            for number, labels in enumerate(all_labels):
                own = cells[number * width : (number + 1) * width]
                if any(own) or not labels:
                    yield Series({declaration.owner: owner, **labels}, _value(declaration, own))


def _value(declaration: Declaration, cells: Sequence[int]) -> float | Histogram:
    if declaration.kind == "histogram":
        return Histogram(tuple(cells[:-1]), cells[-1] * declaration.scale)
    return cells[0] * declaration.scale


def _queue_family(families: Mapping[str, Family]) -> Family:
    """Shards in each device's queues. Processes count while this reads, so a difference may be off by a few."""
    waiting: dict[str, float] = defaultdict(float)
    for taken in families["coarse_taken_shards_total"].series:
        assert isinstance(taken.value, float)
        waiting[taken.labels["device"]] -= taken.value
    for pushed in families["coarse_pushed_shards_total"].series:
        assert isinstance(pushed.value, float)
        waiting[pushed.labels["device"]] += pushed.value
    series = (Series({"device": device}, max(0.0, count)) for device, count in waiting.items())
    return Family(DECLARATIONS[QUEUE_SHARDS], tuple(series))

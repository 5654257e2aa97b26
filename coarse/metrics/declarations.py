"""The declared metrics (coarse/kernels/src/shared_memory/metrics.cpp), and their names for readers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coarse.kernels import _native

PREFIX: Final = "coarse_"
QUEUE_SHARDS: Final = "coarse_queue_shards"
"""The metric that readers compute, as pushed shards without taken ones."""

BUCKET_BOUNDS_S: Final = tuple(bound / 1e9 for bound in _native.metric_bucket_bounds_ns())
"""Upper bounds of the buckets of all histograms, in seconds; one more bucket holds longer durations."""

_SCALES = {"seconds": 1e-9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A metric.

    Args:
        number: Its position in the native table; -1 if readers compute it.
        name: As Prometheus's conventions have it.
        kind: "counter", "gauge" or "histogram".
        owner: "worker" or "device": the label by which a value names its process.
        labels: Further labels.
        help: One sentence without a full stop.
        scale: Factor from a cell to the value.
    """

    number: int
    name: str
    kind: str
    owner: str
    labels: tuple[str, ...]
    help: str
    scale: float = 1.0

    def series(self, num_devices: int) -> list[dict[str, str]]:
        """The further labels of each series, in the order of the series."""
        values = [label_values(label, num_devices) for label in self.labels]
        return [dict(zip(self.labels, each, strict=True)) for each in itertools.product(*values)]


def label_values(label: str, num_devices: int) -> list[str]:
    """The values of a label, in the order of their numbers."""
    if label == "device":
        return [device_label(device) for device in range(num_devices)]
    return _native.metric_label_values(label)


def device_label(device: int) -> str:
    """A memory device's name, as in the log."""
    return f"md{device}"


def _declared(number: int, native: tuple[str, str, str, str, list[str], str]) -> Declaration:
    name, kind, unit, owner, labels, help_text = native
    return Declaration(
        number=number,
        name=name,
        kind=kind,
        owner=owner,
        labels=tuple(labels),
        help=help_text,
        scale=_SCALES.get(unit, 1.0),
    )


_QUEUE = Declaration(
    number=-1,
    name=QUEUE_SHARDS,
    kind="gauge",
    owner="device",
    labels=(),
    help="Announced shards that wait in the memory device's queues",
)

DECLARATIONS: Final[Mapping[str, Declaration]] = {
    each.name: each
    for each in (*itertools.starmap(_declared, enumerate(_native.metric_declarations())), _QUEUE)
}
"""All metrics by name."""

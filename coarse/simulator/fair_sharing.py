"""Max-min fair rates by progressive filling, vectorised over classes of equal flows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Usage = tuple[tuple[str, float], ...]
"""The buckets of a flow, each with the bytes that cross it per byte of the flow."""

_ALIKE = 1e-12  # relative; levels that rounding alone separates fill up together


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuckets:
    """Classes of equal flows and the buckets that they share. Immutable.

    Args:
        capacities: Bytes per second of each bucket.
        flow_class, bucket, weight: One entry per bucket of each class; parallel arrays. The weight is the number of
            bytes that cross the bucket for each byte of one flow.
    """

    capacities: NDArray[np.float64]
    flow_class: NDArray[np.intp]
    bucket: NDArray[np.intp]
    weight: NDArray[np.float64]

    @classmethod
    def of(cls, usages: Sequence[Usage], capacities: Mapping[str, float]) -> SharedBuckets:
        """The classes in the order of `usages`, the buckets in that of `capacities`."""
        number = {name: position for position, name in enumerate(capacities)}
        entries = [
            (flow_class, number[bucket], weight)
            for flow_class, usage in enumerate(usages)
            for bucket, weight in usage
            if weight > 0
        ]
        return cls(
            capacities=np.array(list(capacities.values()), dtype=np.float64),
            flow_class=np.array([entry[0] for entry in entries], dtype=np.intp),
            bucket=np.array([entry[1] for entry in entries], dtype=np.intp),
            weight=np.array([entry[2] for entry in entries], dtype=np.float64),
        )

    def load(self, class_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum in each bucket of a value per class times its weight."""
        values = self.weight * class_values[self.flow_class]
        return np.bincount(self.bucket, values, minlength=len(self.capacities)).astype(np.float64)

    def crosses(self, buckets: NDArray[np.bool_], num_classes: int) -> NDArray[np.bool_]:
        """The classes that use at least one of `buckets`."""
        return np.bincount(self.flow_class, buckets[self.bucket], minlength=num_classes) > 0


def fair_rates(shared: SharedBuckets, counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bytes per second of each flow of each class, when `counts` flows of it are active; 0 for inactive classes.

    All rates grow together until a bucket is full; its flows keep that rate, and the others go on. No flow can then
    gain without a loss of one that is not faster.
    """
    rates = np.zeros(len(counts))
    left = shared.capacities.copy()
    growing = counts > 0
    while growing.any():
        load = shared.load(counts * growing)
        levels = np.full(len(left), np.inf)
        np.divide(left, load, out=levels, where=load > 0)
        level = levels.min()
        full = levels <= level * (1 + _ALIKE)
        stopping = growing & shared.crosses(full, len(counts))
        rates[stopping] = level
        left = np.maximum(left - shared.load(counts * stopping) * level, 0.0)
        growing &= ~stopping
    return rates

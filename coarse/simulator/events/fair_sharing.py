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

    def of_active(self, is_active: NDArray[np.bool_]) -> SharedBuckets:
        """The same without the entries of inactive classes."""
        kept = is_active[self.flow_class]
        return SharedBuckets(
            capacities=self.capacities,
            flow_class=self.flow_class[kept],
            bucket=self.bucket[kept],
            weight=self.weight[kept],
        )

    def load(self, class_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum in each bucket of a value per class times its weight."""
        values = self.weight * class_values[self.flow_class]
        return np.bincount(self.bucket, values, minlength=len(self.capacities)).astype(np.float64)

    def least_of_class(self, bucket_values: NDArray[np.float64], num_classes: int) -> NDArray[np.float64]:
        """The least value of the buckets that each class crosses; infinite for classes without entries."""
        least = np.full(num_classes, np.inf)
        np.minimum.at(least, self.flow_class, bucket_values[self.bucket])
        return least

    def least_of_bucket(self, class_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The least value of the classes that cross each bucket; infinite for buckets without entries."""
        least = np.full(len(self.capacities), np.inf)
        np.minimum.at(least, self.bucket, class_values[self.flow_class])
        return least


def fair_rates(shared: SharedBuckets, counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bytes per second of each flow of each class, when `counts` flows of it are active; 0 for inactive classes.

    Progressive filling: all rates grow together until a bucket is full; its flows keep that rate, and the others go
    on. No flow can then gain without a loss of one that is not faster. A bucket whose level is the least of all
    buckets that its flows cross fills up before them, whatever happens elsewhere, so all such buckets fill up in one
    round.
    """
    rates, left, growing = np.zeros(len(counts)), shared.capacities.copy(), counts > 0
    while growing.any():
        shared = shared.of_active(growing)
        load = shared.load(counts)
        levels = np.full(len(left), np.inf)
        np.divide(left, load, out=levels, where=load > 0)
        class_levels = shared.least_of_class(levels, len(counts))
        fills_first = levels <= shared.least_of_bucket(class_levels) * (1 + _ALIKE)
        stopping = growing & (shared.least_of_class(np.where(fills_first, 0.0, 1.0), len(counts)) == 0)
        rates[stopping] = class_levels[stopping]
        left = np.maximum(left - shared.load(counts * rates * stopping), 0.0)
        growing &= ~stopping
    return rates

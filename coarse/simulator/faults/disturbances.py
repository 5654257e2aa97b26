"""Slowdowns of single workers and links: stragglers, jitter and degraded links.

The runtime's plans know nothing of them: they are those of an undisturbed step.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

_MOST_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbances:
    """Workers and links that are slower than their equals. They keep machines from being folded.

    Args:
        slow_workers: How many times longer a worker computes, by worker.
        slow_links: How many times less bandwidth a link has, by its name; sync cores count as links.

    Raises:
        ValueError: If a factor is not above 0 and finite, or a worker's number is negative.
    """

    slow_workers: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    slow_links: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for name, factor in (*self.slow_workers.items(), *self.slow_links.items()):
            if not 0 < factor < math.inf:
                raise ValueError(f"{name} cannot be {factor:g} times slower: a factor is above 0 and finite")
        if min(self.slow_workers, default=0) < 0:
            raise ValueError(f"workers are numbered from 0: {min(self.slow_workers)}")

    def __bool__(self) -> bool:
        return bool(self.slow_workers or self.slow_links)

    def compute_factor(self, worker: int) -> float:
        """How many times longer this worker computes."""
        return self.slow_workers.get(worker, 1.0)

    def slowest(self, num_workers: int) -> float:
        """The largest of these factors, on which collectives of all workers wait.

        Raises:
            ValueError: If a slow worker does not exist.
        """
        if max(self.slow_workers, default=0) >= num_workers:
            raise ValueError(f"there is no worker {max(self.slow_workers)} among {num_workers}")
        others = [1.0] if len(self.slow_workers) < num_workers else []
        return max((*self.slow_workers.values(), *others))

    def slowed(self, capacities: Mapping[str, float]) -> dict[str, float]:
        """Bytes per second of all links.

        Raises:
            ValueError: If a slow link does not exist.
        """
        for name in self.slow_links:
            if name not in capacities:
                raise ValueError(f"there is no link {name!r}; {_similar(name, list(capacities))}")
        return {name: rate / self.slow_links.get(name, 1.0) for name, rate in capacities.items()}


UNDISTURBED = Disturbances()


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Random times of computation, drawn anew for each worker and step: log-normal with a mean of 1 (assumed).

    Args:
        variation: Standard deviation over mean.
        num_steps: Steps to simulate.
        seed: Equal seeds give equal steps.

    Raises:
        ValueError: If a number is out of range.
    """

    variation: float
    num_steps: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.variation < math.inf or self.num_steps < 1 or self.seed < 0:
            raise ValueError(f"jitter and seed start at 0, steps at 1: {self}")

    def steps(self, num_workers: int, base: Disturbances = UNDISTURBED) -> Iterator[Disturbances]:
        """The disturbances of each step, on top of `base`."""
        sigma = math.sqrt(math.log1p(self.variation**2))
        for step in range(self.num_steps):
            chance = np.random.default_rng((self.seed, step))
            factors = chance.lognormal(-(sigma**2) / 2, sigma, num_workers)
            yield Disturbances(
                slow_workers={
                    worker: base.compute_factor(worker) * float(factor)
                    for worker, factor in enumerate(factors)
                },
                slow_links=base.slow_links,
            )


def _similar(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, _MOST_NAMES, 0.0)
    return f"of {len(known)} links, the most similar: {', '.join(near)}"

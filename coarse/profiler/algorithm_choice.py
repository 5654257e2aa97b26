"""Which algorithm reduces large tensors fastest between the GPUs of memory devices: by trying each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from coarse.client.schema import TensorSpec

if TYPE_CHECKING:
    from coarse.client.client import Client

_TRIAL = TensorSpec(name="trial", dtype="float32", num_elements=(32 << 20) // 4, op="mean")
_NUM_TRIALS = 5  # of which the first is not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmChoice:
    """The fastest of several algorithms.

    Args:
        seconds: What a push and a pull of all workers took by each.
    """

    seconds: Mapping[str, float]

    @property
    def algorithm(self) -> str:
        """Its name."""
        return min(self.seconds, key=self.seconds.__getitem__)

    def __str__(self) -> str:
        times = ", ".join(f"{seconds * 1e3:.2f} ms by {name}" for name, seconds in self.seconds.items())
        return f"large tensors between memory devices by {self.algorithm}: {_TRIAL.nbytes >> 20} MiB took {times}"


def measure_algorithms(client: Client, algorithms: Sequence[str], gpu: str) -> AlgorithmChoice:
    """Times each algorithm; every worker must call it with the same ones, and gets the same choice.

    Args:
        client: Of this worker.
        algorithms: For which the memory devices are set up.
        gpu: Where this worker's tensors are, as for Client.register().
    """
    seconds = np.array([_least_seconds(client, algorithm, gpu) for algorithm in algorithms])
    client.all_reduce(seconds.ctypes.data, len(algorithms), "float64", "max")
    return AlgorithmChoice(seconds=dict(zip(algorithms, map(float, seconds), strict=True)))


def _least_seconds(client: Client, algorithm: str, gpu: str) -> float:
    group = client.register_trial(f"trial of {algorithm}", _TRIAL, algorithm, gpu)
    barrier = np.zeros(1)
    times = []
    for _ in range(_NUM_TRIALS):
        client.all_reduce(barrier.ctypes.data, 1, "float64", "sum")
        begin = time.perf_counter()
        group.push(0)
        group.pull_all()
        times.append(time.perf_counter() - begin)
    group.close()
    return min(times[1:])

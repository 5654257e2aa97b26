"""Test contributions that differ by worker and position and whose sums have a closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# A prime, so that a piece at a wrong power-of-two offset is detected.
_PERIOD = 251
_BLOCK_PERIODS = 1024
_RELATIVE_TOLERANCE = 1e-6


def fill(buffer: Array, scale: float) -> None:
    """Writes `scale` times 1, 2, ... 251, 1, 2, ... to all of a flat `buffer`."""
    block = _block(buffer.dtype, scale)
    for start in range(0, buffer.size, block.size):
        part = buffer[start : start + block.size]
        part[...] = block[: part.size]


def first_difference(buffer: Array, scale: float) -> str | None:
    """Compares all of `buffer` with the result of `fill(buffer, scale)`; describes the first difference.

    Floats may differ by a relative 1e-6 (the division of a mean), integers not at all.
    """
    block = _block(buffer.dtype, scale)
    tolerance = _RELATIVE_TOLERANCE if buffer.dtype.kind == "f" else 0.0
    for start in range(0, buffer.size, block.size):
        part = buffer[start : start + block.size]
        expected = block[: part.size]
        wrong = ~np.isclose(part, expected, rtol=tolerance, atol=0.0)
        if wrong.any():
            at = int(np.argmax(wrong))
            return f"element {start + at} of {buffer.size} is {part[at]}, not {expected[at]}"
    return None


def contribution_scale(rank: int) -> int:
    """Factor of a worker's contribution: a power of two, so that a sum identifies its contributors."""
    return 1 << rank


def reduced_scale(num_workers: int, *, mean: bool) -> float:
    """Factor of the sum, or the mean, of all workers' contributions."""
    total = (1 << num_workers) - 1
    return total / num_workers if mean else total


def _block(dtype: np.dtype[Any], scale: float) -> Array:
    values = np.arange(1, _PERIOD + 1, dtype=np.float64) * scale
    return np.tile(values.astype(dtype), _BLOCK_PERIODS)

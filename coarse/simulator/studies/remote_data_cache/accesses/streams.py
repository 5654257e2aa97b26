"""Address streams: a workload as kernels, each a sequence of line accesses by its thread blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Lines = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Accesses that leave the L1 caches, in the order of their thread blocks.

    Args:
        block: Position of the access's thread block in the grid, from 0 to below 1, ascending.
        line: Line that it accesses.
        is_write: Whether it writes the whole line.
    """

    block: NDArray[np.float64]
    line: Lines
    is_write: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """All accesses of a workload on some GPUs, in the order in which they happen.

    GPUs take equal, contiguous batches of thread blocks and run at the same pace: who is first in a round of
    accesses, one of each GPU, is drawn anew.

    Args:
        num_gpus: GPUs that run it.
        kernel, gpu, line, is_write: One entry per access; kernels are numbered from 0, ascending.
        num_kernels: Kernels, one after the other.
    """

    num_gpus: int
    num_kernels: int
    kernel: NDArray[np.int64]
    gpu: NDArray[np.int64]
    line: Lines
    is_write: NDArray[np.bool_]

    @classmethod
    def of(cls, kernels: Sequence[Kernel], num_gpus: int) -> Stream:
        """The kernels on so many GPUs."""
        parts = [_in_time(kernel, num_gpus) for kernel in kernels]
        return cls(
            num_gpus=num_gpus,
            num_kernels=len(kernels),
            kernel=np.repeat(np.arange(len(kernels)), [len(kernel.line) for kernel in kernels]),
            gpu=np.concatenate([gpu for gpu, _ in parts]),
            line=np.concatenate([k.line[order] for k, (_, order) in zip(kernels, parts, strict=True)]),
            is_write=np.concatenate(
                [k.is_write[order] for k, (_, order) in zip(kernels, parts, strict=True)]
            ),
        )


def _in_time(kernel: Kernel, num_gpus: int) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """GPUs in the order of accesses, and that order: each GPU has done the same share of its batch."""
    gpu = (kernel.block * num_gpus).astype(np.int64)
    counts = np.bincount(gpu, minlength=num_gpus)
    first = np.cumsum(counts) - counts
    chance = np.random.default_rng(len(gpu)).random(len(gpu))
    done = (np.arange(len(gpu)) - first[gpu] + chance) / counts[gpu]
    order = np.argsort(done, kind="stable")
    return gpu[order], order

"""Who uses which pages and lines: the document's Fig 4, and the memory that copies of all shared pages take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coarse.simulator.studies.remote_data_cache.accesses.streams import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How a workload's blocks, which are pages or lines, are used.

    Args:
        read_write_share: Part of the accesses that go to blocks which several GPUs use and at least one writes.
        copies: GPUs that use a block, on average over blocks: the memory of a copy for each, relative to none.
    """

    read_write_share: float
    copies: float


def sharing_of(stream: Stream, is_counted: NDArray[np.bool_], block_lines: int) -> Sharing:
    """Sharing of blocks of so many lines.

    Args:
        stream: Accesses; all decide how a block is used.
        is_counted: Those whose share is returned.
        block_lines: Lines of a page, or 1.
    """
    block = stream.line // block_lines
    is_used = np.zeros((block.max() + 1, stream.num_gpus), dtype=bool)
    is_used[block, stream.gpu] = True
    is_written = np.zeros(len(is_used), dtype=bool)
    is_written[block[stream.is_write]] = True
    users = is_used.sum(axis=1)
    return Sharing(
        read_write_share=float((is_written & (users > 1))[block[is_counted]].mean()),
        copies=float(users[users > 0].mean()),
    )

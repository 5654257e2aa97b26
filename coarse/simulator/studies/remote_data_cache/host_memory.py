"""The cost of a smaller GPU memory for a program that fills it: its coldest pages lie in host memory (Table V b).

A kernel that touches such a page waits until the page has come over the host's link. The page leaves when the kernel
is over, at the same time as others come.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coarse.simulator.studies.remote_data_cache.accesses.streams import Stream
from coarse.simulator.studies.remote_data_cache.parameters import LINE_BYTES, Machine


def waiting_seconds(stream: Stream, machine: Machine, share: float) -> NDArray[np.float64]:
    """Time that each kernel waits for pages of the host.

    Args:
        stream: Accesses.
        machine: Page size and host links; each GPU has one.
        share: Part of the pages that lie in the host's memory, those with the fewest accesses.
    """
    page = stream.line // machine.page_lines
    is_out = _coldest(page, share)
    touched = is_out[page]
    key = np.unique(stream.kernel[touched] * len(is_out) + page[touched], return_index=True)[1]
    kernel, gpu = stream.kernel[touched][key], stream.gpu[touched][key]
    pages = np.zeros((stream.num_kernels, stream.num_gpus))
    np.add.at(pages, (kernel, gpu), 1)
    slowest: NDArray[np.float64] = pages.max(axis=1)
    return slowest * (machine.page_lines * LINE_BYTES / machine.host_bytes_per_s)


def _coldest(page: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    accesses = np.bincount(page)
    used = np.random.default_rng(len(accesses)).permutation(
        np.flatnonzero(accesses)
    )  # equally cold pages: any
    coldest = used[np.argsort(accesses[used], kind="stable")[: round(share * len(used))]]
    is_coldest = np.zeros(len(accesses), dtype=bool)
    is_coldest[coldest] = True
    return is_coldest

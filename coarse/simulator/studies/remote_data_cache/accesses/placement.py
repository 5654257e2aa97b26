"""Homes of pages: first touch, migration to the busiest reader, replication of pages that nobody writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coarse.simulator.studies.remote_data_cache.accesses.streams import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where each access of a stream finds its page.

    Args:
        home: GPU of the page, per access.
        is_remote: Whether the access needs another GPU's memory.
        copied_pages: Pages that each GPU copies to itself, by kernel and GPU.
    """

    home: NDArray[np.int64]
    is_remote: NDArray[np.bool_]
    copied_pages: NDArray[np.int64]


def first_touch(stream: Stream, page_lines: int) -> Placement:
    """A page is at the GPU that accesses it first."""
    page = stream.line // page_lines
    return _placement(stream, _first_gpus(stream, page)[page])


def all_local(stream: Stream) -> Placement:
    """Every page at every GPU: the ideal."""
    return Placement(
        home=stream.gpu, is_remote=np.zeros(len(stream.gpu), dtype=bool), copied_pages=_no_copies(stream)
    )


def replicated(stream: Stream, page_lines: int) -> Placement:
    """First touch, and a GPU that reads a remote page copies it, unless the page was ever written.

    A write collapses the copies of its page for good.
    """
    base, page = first_touch(stream, page_lines), stream.line // page_lines
    position = np.arange(len(page))
    first_write = np.full(page.max() + 1, len(page))
    np.minimum.at(first_write, page[stream.is_write], position[stream.is_write])
    served_by_copy = base.is_remote & (position < first_write[page])
    _, first = np.unique(
        page[served_by_copy] * stream.num_gpus + stream.gpu[served_by_copy], return_index=True
    )
    copied = position[served_by_copy][first]
    copies = _no_copies(stream)
    np.add.at(copies, (stream.kernel[copied], stream.gpu[copied]), 1)
    return Placement(home=base.home, is_remote=base.is_remote & ~served_by_copy, copied_pages=copies)


def migrated(stream: Stream, page_lines: int) -> Placement:
    """First touch; after each kernel a page moves to the GPU with more than half of its accesses in it."""
    page = stream.line // page_lines
    home_of = _first_gpus(stream, page)
    home, copies = np.empty_like(stream.gpu), _no_copies(stream)
    for kernel in range(stream.num_kernels):
        now = stream.kernel == kernel
        home[now] = home_of[page[now]]
        counts = np.zeros((len(home_of), stream.num_gpus), dtype=np.int64)
        np.add.at(counts, (page[now], stream.gpu[now]), 1)
        busiest = counts.argmax(axis=1)
        moves = (2 * counts.max(axis=1) > counts.sum(axis=1)) & (busiest != home_of)
        home_of = np.where(moves, busiest, home_of)
        copies[kernel] = np.bincount(busiest[moves], minlength=stream.num_gpus)
    return Placement(home=home, is_remote=home != stream.gpu, copied_pages=copies)


def _placement(stream: Stream, home: NDArray[np.int64]) -> Placement:
    return Placement(home=home, is_remote=home != stream.gpu, copied_pages=_no_copies(stream))


def _no_copies(stream: Stream) -> NDArray[np.int64]:
    return np.zeros((stream.num_kernels, stream.num_gpus), dtype=np.int64)


def _first_gpus(stream: Stream, page: NDArray[np.int64]) -> NDArray[np.int64]:
    """GPU of each page's first access, by page."""
    pages, first = np.unique(page, return_index=True)
    gpus = np.zeros(page.max() + 1, dtype=np.int64)
    gpus[pages] = stream.gpu[first]
    return gpus

"""The last-level caches: set-associative, least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coarse.simulator.studies.remote_data_cache.accesses.streams import Stream

_CLEAN, _DIRTY, _REMOTE = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOutcome:
    """The accesses that pass the last-level caches.

    Args:
        is_hit: Per access.
        written_back: Dirty local lines that left, by kernel and GPU.
    """

    is_hit: NDArray[np.bool_]
    written_back: NDArray[np.int64]


def last_level_hits(stream: Stream, is_remote: NDArray[np.bool_], *, sets: int, ways: int) -> CacheOutcome:
    """Runs a stream through one cache per GPU.

    A cache holds local and remote lines. Local lines are written back when they leave; remote lines are written
    through, and all leave at the end of each kernel (software coherence).

    Args:
        stream: Accesses.
        is_remote: Whether each needs another GPU's memory.
        sets, ways: Of each cache.
    """
    caches: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(stream.num_gpus * sets)]
    place = stream.gpu * sets + _set_of(stream.line, sets)
    kind = np.where(is_remote, _REMOTE, np.where(stream.is_write, _DIRTY, _CLEAN))
    bounds = np.searchsorted(stream.kernel, np.arange(stream.num_kernels + 1))
    is_hit: list[bool] = []
    written_back = np.zeros((stream.num_kernels, stream.num_gpus), dtype=np.int64)
    for kernel in range(stream.num_kernels):
        part = slice(bounds[kernel], bounds[kernel + 1])
        left = _run(
            caches, place[part].tolist(), stream.line[part].tolist(), kind[part].tolist(), ways, is_hit
        )
        written_back[kernel] = np.bincount(np.array(left, dtype=np.int64) // sets, minlength=stream.num_gpus)
        _drop_remote(caches)
    return CacheOutcome(is_hit=np.array(is_hit, dtype=bool), written_back=written_back)


def _set_of(line: NDArray[np.int64], sets: int) -> NDArray[np.int64]:
    """Sets as caches hash them, so that strides do not collide."""
    return (line ^ (line // sets) ^ (line // sets**2)) % sets


def _run(
    caches: list[OrderedDict[int, int]],
    places: list[int],
    lines: list[int],
    kinds: list[int],
    ways: int,
    is_hit: list[bool],
) -> list[int]:
    """Appends to `is_hit`; returns the set of each dirty line that left."""
    left: list[int] = []
    for place, line, kind in zip(places, lines, kinds, strict=True):
        cache = caches[place]
        found = line in cache
        is_hit.append(found)
        if found:
            cache.move_to_end(line)
            cache[line] = max(kind, cache[line])
        else:
            if len(cache) == ways and cache.popitem(last=False)[1] == _DIRTY:
                left.append(place)
            cache[line] = kind
    return left


def _drop_remote(caches: list[OrderedDict[int, int]]) -> None:
    for cache in caches:
        for line in [line for line, kind in cache.items() if kind == _REMOTE]:
            del cache[line]

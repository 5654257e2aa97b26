"""The remote data caches: which accesses hit, and what travels, for a whole stream at once.

The cache is direct mapped. So an access hits if the access before it in its set had the same line, and nothing made
the line invalid in between. `protocol` does the same step by step; the tests compare them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from coarse.simulator.studies.remote_data_cache.accesses.streams import Stream


class Coherence(Enum):
    """How copies in remote data caches become invalid."""

    NONE = "no coherence"
    """Never: an upper bound, which returns stale values."""
    SOFTWARE = "software"
    """All at the end of a kernel, by an epoch counter."""
    HARDWARE = "hardware"
    """Each by the write that makes it stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOutcome:
    """What remote data caches let through. All arrays have an entry per access.

    Args:
        is_probe: Reads of remote lines that missed the last-level cache.
        is_hit: Those of them that hit.
        is_install: Accesses that put their line into the cache.
        is_sent: Writes that the home receives; all remote ones, if the cache writes through.
        is_broadcast: Writes for which the home sends invalidations.
    """

    is_probe: NDArray[np.bool_]
    is_hit: NDArray[np.bool_]
    is_install: NDArray[np.bool_]
    is_sent: NDArray[np.bool_]
    is_broadcast: NDArray[np.bool_]


def without_cache(stream: Stream, is_remote: NDArray[np.bool_]) -> RemoteOutcome:
    """No remote data cache: every remote access goes to its home."""
    none = np.zeros(len(stream.line), dtype=bool)
    return RemoteOutcome(
        is_probe=none, is_hit=none, is_install=none, is_sent=stream.is_write & is_remote, is_broadcast=none
    )


def with_cache(
    stream: Stream,
    is_remote: NDArray[np.bool_],
    is_cached: NDArray[np.bool_],
    *,
    num_lines: int,
    coherence: Coherence,
    private_probability: float,
    writes_back: bool = False,
) -> RemoteOutcome:
    """Remote data caches of so many lines.

    Args:
        stream: Accesses.
        is_remote: Whether each needs another GPU's memory.
        is_cached: Whether it hits the last-level cache.
        num_lines: Of each cache.
        coherence: What makes lines invalid.
        private_probability: With which a local write ends a line's sharing state.
        writes_back: Keeps written lines until they are evicted or the kernel ends, instead of writing through.
    """
    remote_write = is_remote & stream.is_write
    is_probe = is_remote & ~stream.is_write & ~is_cached
    place = np.flatnonzero(is_probe | remote_write)
    before = _previous_of_set(stream, place, num_lines)
    is_held = _is_held(stream, place, before, coherence)
    is_hit = np.zeros(len(stream.line), dtype=bool)
    is_hit[place] = is_held
    is_hit &= is_probe
    none = np.zeros(len(stream.line), dtype=bool)
    return RemoteOutcome(
        is_probe=is_probe,
        is_hit=is_hit,
        is_install=(is_probe & ~is_hit) | remote_write,
        is_sent=_written_back(stream, place, num_lines) if writes_back else remote_write,
        is_broadcast=(
            _broadcasts(stream, is_remote, is_probe & ~is_hit, private_probability)
            if coherence is Coherence.HARDWARE
            else none
        ),
    )


def _cache_set(stream: Stream, place: NDArray[np.intp], num_lines: int) -> NDArray[np.int64]:
    """A number for each set of each GPU's cache."""
    sets: NDArray[np.int64] = stream.gpu[place] * num_lines + stream.line[place] % num_lines
    return sets


def _previous_of_set(stream: Stream, place: NDArray[np.intp], num_lines: int) -> NDArray[np.intp]:
    """Access before each of `place` in the same set of the same cache; -1 for none."""
    cache_set = _cache_set(stream, place, num_lines)
    order = np.argsort(cache_set, kind="stable")
    before = np.full(len(place), -1)
    is_same = np.diff(cache_set[order]) == 0
    before[order[1:][is_same]] = place[order[:-1][is_same]]
    return before


def _is_held(
    stream: Stream, place: NDArray[np.intp], before: NDArray[np.intp], coherence: Coherence
) -> NDArray[np.bool_]:
    is_held: NDArray[np.bool_] = (before >= 0) & (stream.line[before] == stream.line[place])
    if coherence is Coherence.SOFTWARE:
        is_held &= stream.kernel[before] == stream.kernel[place]
    if coherence is Coherence.HARDWARE:
        is_held &= _writes_between(stream, before, place) == 0
    return is_held


def _writes_between(stream: Stream, before: NDArray[np.intp], place: NDArray[np.intp]) -> NDArray[np.intp]:
    """Writes to the line of `place` after `before` and before `place`, all by other GPUs."""
    length = len(stream.line)
    writes = np.flatnonzero(stream.is_write)
    keys = np.sort(stream.line[writes] * length + writes)
    start = stream.line[place] * length
    return np.searchsorted(keys, start + place) - np.searchsorted(keys, start + before, side="right")


def _written_back(stream: Stream, place: NDArray[np.intp], num_lines: int) -> NDArray[np.bool_]:
    """The last write of each stay of a line in a cache; a stay ends with an eviction or with the kernel."""
    cache_set = _cache_set(stream, place, num_lines)
    order = np.argsort(cache_set, kind="stable")
    sorted_place = place[order]
    keys = np.stack([cache_set[order], stream.line[sorted_place], stream.kernel[sorted_place]])
    stay = np.cumsum(np.diff(keys, axis=1, prepend=-1).any(axis=0))
    is_write = stream.is_write[sorted_place]
    is_last = np.diff(stay[is_write], append=-1) != 0
    last = np.zeros(len(stream.line), dtype=bool)
    last[sorted_place[is_write][is_last]] = True
    return last


def _broadcasts(
    stream: Stream, is_remote: NDArray[np.bool_], is_fetch: NDArray[np.bool_], private_probability: float
) -> NDArray[np.bool_]:
    """Writes to lines that the home's tracker does not know as private.

    A remote read or write makes a line shared. A local write, after its broadcast, makes it private with a small
    probability. A line that no remote GPU has used is not shared.
    """
    place = np.flatnonzero(is_fetch | stream.is_write)
    order = np.argsort(stream.line[place], kind="stable")
    sorted_place = place[order]
    line = stream.line[sorted_place]
    shares = is_remote[sorted_place]
    chance = np.random.default_rng(len(line)).random(len(line))
    ends = ~shares & (chance < private_probability)
    last_shared, last_ended = _last_before(line, shares), _last_before(line, ends)
    is_broadcast = np.zeros(len(stream.line), dtype=bool)
    is_broadcast[sorted_place] = stream.is_write[sorted_place] & (last_shared > last_ended)
    return is_broadcast


def _last_before(line: NDArray[np.int64], is_event: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Position of the last event of the same line before each position; -1 for none. Lines are sorted."""
    position = np.arange(len(line))
    last = np.maximum.accumulate(np.where(is_event, position, -1))
    last = np.concatenate([[-1], last[:-1]]) if len(line) else last
    return np.where(last >= np.searchsorted(line, line), last, -1)

"""Traces of the protocol: epochs of software coherence, and the sharing tracker of hardware coherence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coarse.simulator.studies.remote_data_cache.caches.protocol import System
from coarse.simulator.studies.remote_data_cache.caches.remote_cache import Coherence
from coarse.simulator.studies.study import StateTable

_Step = tuple[str, Callable[[System], object]]


def epochs() -> StateTable:
    """A reader's cache over kernels, with a counter of 1 bit, which soon starts again."""
    system = System(num_nodes=2, cache_lines=4, coherence=Coherence.SOFTWARE, epoch_bits=1)
    steps: Sequence[_Step] = (
        ("GPU 0 reads line 1 of GPU 1", lambda each: each.read(0, 1)),
        ("GPU 0 reads it again", lambda each: each.read(0, 1)),
        ("GPU 1 writes it", lambda each: each.write(1, 1)),
        ("GPU 0 reads it: the kernel goes on, so the old value is allowed", lambda each: each.read(0, 1)),
        ("the kernel ends", lambda each: each.end_kernel()),
        ("GPU 0 reads it", lambda each: each.read(0, 1)),
        ("the kernel ends, and the counter starts again", lambda each: each.end_kernel()),
        ("GPU 0 reads it", lambda each: each.read(0, 1)),
    )
    return StateTable(
        title="Software coherence: the remote data cache of GPU 0",
        columns=("step", "epoch", "line 1 in the cache", "hits", "lines reset"),
        rows=[(what, *_epoch_cells(_after(system, step))) for what, step in steps],
    )


def tracker() -> StateTable:
    """The tracker of a line at its home, when a local write always ends its sharing."""
    system = System(num_nodes=3, cache_lines=4, coherence=Coherence.HARDWARE, private_probability=1.0)
    steps: Sequence[_Step] = (
        ("GPU 0, its home, writes line 0", lambda each: each.write(0, 0)),
        ("GPU 1 reads it", lambda each: each.read(1, 0)),
        ("GPU 0 writes it, and it becomes private", lambda each: each.write(0, 0)),
        ("GPU 0 writes it again", lambda each: each.write(0, 0)),
        ("GPU 2 writes it", lambda each: each.write(2, 0)),
        ("GPU 1 reads it", lambda each: each.read(1, 0)),
        ("GPU 2 writes it", lambda each: each.write(2, 0)),
    )
    return StateTable(
        title="Hardware coherence: line 0",
        columns=("step", "tracker", "copies at", "invalidations so far"),
        rows=[(what, *_tracker_cells(_after(system, step))) for what, step in steps],
    )


def _after(system: System, step: Callable[[System], object]) -> System:
    step(system)
    system.deliver_all()
    return system


def _epoch_cells(system: System) -> Sequence[str]:
    cache = system.caches[0]
    held = cache.sets.get(1)
    state = "-" if held is None else f"value {held.value} of epoch {held.epoch}"
    return (str(cache.epoch(0)), state, str(system.num_hits), str(cache.num_reset_lines))


def _tracker_cells(system: System) -> Sequence[str]:
    copies = [f"GPU {node}" for node, cache in enumerate(system.caches) if cache.find(0, 0) is not None]
    state = system.homes[0].sharing_of(0).value
    return (state, ", ".join(copies) or "-", str(system.num_invalidations))

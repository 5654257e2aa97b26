"""Chooses the way of an all-reduce among the workers by size, from measurements on the same links.

The peer of COARSE in `coarse bench replay`, as strong as it can be made: as NCCL's tuner does, it takes the fastest
algorithm for each size. Several shards of a size are under way at once, as those of a backward pass are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from coarse.bench.sync.driver import format_bytes
from coarse.client.tensor_group import TensorGroup
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.tuning.measure import gather_bytes

AT_ONCE = 8
"""Shards of a size that are timed together."""

REPEATS = 5
REPEATS_OF_ALL = 2
"""Repeats of every way; later ones are of those that are not FAR from the fastest."""

FAR = 1.5
"""A way is far from the fastest if it takes this many times as long, each in its fastest repeat."""

Seconds = Mapping[int, Mapping[str, Sequence[float]]]
"""Seconds of each repeat on its slowest worker, by bytes of a shard and by way."""


def size_class(nbytes: int) -> int:
    """The power of two from `nbytes` on, at least 4."""
    return max(4, 1 << (nbytes - 1).bit_length())


def fastest_ways_of(
    session: Session, group: TensorGroup, ways: Sequence[str], known: Mapping[int, str]
) -> dict[int, str]:
    """The fastest of `ways` for each size class of `group`; every worker calls it and gets the same choice.

    Args:
        session: An emulated session without dual synchronisation.
        group: The tensors to reduce; they stay as they are.
        ways: Of coarse.profiler.direct_allreduce.WAYS_OVER_NODES.
        known: Earlier choices on the same links, by size class; only the other sizes are measured.
    """
    classes = sorted({size_class(nbytes) for nbytes in group.shard_sizes()})
    if len(ways) == 1:
        return dict.fromkeys(classes, ways[0])
    unknown = [nbytes for nbytes in classes if nbytes not in known]
    fastest = {**known, **fastest_ways(measure_ways(session, unknown, ways))}
    return {nbytes: fastest[nbytes] for nbytes in classes}


def ways_of_shards(sizes: Sequence[int], by_class: Mapping[int, str]) -> dict[int, str]:
    """The way of each shard.

    Args:
        sizes: Bytes of each shard.
        by_class: The way of each size class.
    """
    return {shard: by_class[size_class(nbytes)] for shard, nbytes in enumerate(sizes)}


def measure_ways(session: Session, classes: Sequence[int], ways: Sequence[str]) -> Seconds:
    """Times AT_ONCE shards of each size in every way, and more often those that are not FAR from the fastest."""
    if not classes:
        return {}
    tensors = _register(session, classes)
    seconds: dict[int, dict[str, list[float]]] = {nbytes: {way: [] for way in ways} for nbytes in classes}
    for _ in range(REPEATS):
        close = {nbytes: ways_to_repeat(seconds[nbytes]) for nbytes in classes}
        own = [
            (nbytes, way, _time(session, tensors, _shards(classes, nbytes)))
            for way in ways
            for nbytes in _use(tensors, way, [nbytes for nbytes in classes if way in close[nbytes]])
        ]
        for nbytes, way, slowest_s in _of_slowest_worker(session, own):
            seconds[nbytes][way].append(slowest_s)
    tensors.close()
    return seconds


def ways_to_repeat(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """The ways of one size that one more repeat may show to be the fastest; none if there is only one."""
    if min(map(len, seconds.values())) < REPEATS_OF_ALL:
        return list(seconds)
    least = {way: min(repeats) for way, repeats in seconds.items()}
    close = [way for way, each in least.items() if each <= FAR * min(least.values())]
    return close if len(close) > 1 else []


def fastest_ways(seconds: Seconds) -> dict[int, str]:
    """The way with the fastest repeat, for each size; ties go to the way that is named first."""
    return {nbytes: min(of_size, key=lambda way: min(of_size[way])) for nbytes, of_size in seconds.items()}


def describe_ways(by_class: Mapping[int, str]) -> str:
    """A choice in words, by ranges of sizes in bytes."""
    ranges: list[tuple[int, str]] = []
    for nbytes, way in sorted(by_class.items()):
        if ranges and ranges[-1][1] == way:
            ranges.pop()
        ranges.append((nbytes, way))
    return ", ".join(f"{way} up to {format_bytes(nbytes)}" for nbytes, way in ranges)


def _register(session: Session, classes: Sequence[int]) -> TensorGroup:
    """AT_ONCE tensors of each size, whose pages are mapped, so that no repeat has to wait for that."""
    specs = [
        TensorSpec(name=f"{nbytes} {number}", dtype="float32", num_elements=nbytes // 4, op="sum")
        for nbytes in classes
        for number in range(AT_ONCE)
    ]
    tensors = session.register("all-reduce tuner", specs)
    assert isinstance(tensors, TensorGroup)  # the job has several workers
    for index in range(len(specs)):
        slot = tensors.buffer(index)
        assert isinstance(slot, memoryview)  # replays have no GPU
        np.frombuffer(slot, dtype=np.float32)[:] = 0
    return tensors


def _shards(classes: Sequence[int], nbytes: int) -> range:
    first = classes.index(nbytes) * AT_ONCE
    return range(first, first + AT_ONCE)


def _use(tensors: TensorGroup, way: str, classes: list[int]) -> list[int]:
    """Reduces all tensors in this way from now on, if there are sizes to measure; returns the sizes."""
    if classes:
        tensors.use_direct_allreduce(dict.fromkeys(range(len(tensors.shard_sizes())), way))
    return classes


def _time(session: Session, tensors: TensorGroup, indices: Iterable[int]) -> float:
    session.barrier()
    began_s = time.perf_counter()
    for index in indices:
        tensors.push(index)
    tensors.flush()
    tensors.pull_all()
    return time.perf_counter() - began_s


def _of_slowest_worker(
    session: Session, own: Sequence[tuple[int, str, float]]
) -> list[tuple[int, str, float]]:
    """Each measurement, which all workers made in this order, with the seconds of the slowest worker."""
    seconds = [json.loads(each) for each in gather_bytes(session, json.dumps([s for *_, s in own]).encode())]
    return [
        (nbytes, way, max(of_workers))
        for (nbytes, way, _), of_workers in zip(own, zip(*seconds, strict=True), strict=True)
    ]

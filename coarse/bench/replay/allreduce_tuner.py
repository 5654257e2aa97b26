"""Chooses the way of an all-reduce among the workers by size, from measurements on the same links.

The peer of COARSE in `coarse bench replay`, as strong as it can be made: as NCCL's tuner does, it takes the fastest
algorithm for each size. Several shards of a size are under way at once, as those of a backward pass are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from coarse.bench.sync.driver import format_bytes
from coarse.client.tensor_group import TensorGroup
from coarse.schema import TensorSpec
from coarse.session import Session
from coarse.tuning.measure import gather_bytes

AT_ONCE = 8
"""Shards of a size that are timed together."""

REPEATS = 3

Seconds = Mapping[str, Mapping[int, Sequence[float]]]
"""Seconds of each repeat, by way and by bytes of a shard."""


def size_class(nbytes: int) -> int:
    """The power of two from `nbytes` on, at least 4."""
    return max(4, 1 << (nbytes - 1).bit_length())


def choose_ways(session: Session, group: TensorGroup, ways: Sequence[str]) -> dict[int, str]:
    """The fastest of `ways` for each shard of `group`; every worker calls it and gets the same choice.

    Args:
        session: An emulated session without dual synchronisation.
        group: The tensors to reduce; they stay as they are.
        ways: Of coarse.profiler.direct_allreduce.WAYS.
    """
    sizes = group.shard_sizes()
    if len(ways) == 1:
        return dict.fromkeys(range(len(sizes)), ways[0])
    own = measure_ways(session, sorted({size_class(nbytes) for nbytes in sizes}), ways)
    everybody = [_from_json(each) for each in gather_bytes(session, json.dumps(own).encode())]
    best = fastest_ways(everybody)
    return {shard: best[size_class(nbytes)] for shard, nbytes in enumerate(sizes)}


def measure_ways(session: Session, classes: Sequence[int], ways: Sequence[str]) -> Seconds:
    """Times AT_ONCE shards of each size in every way."""
    specs = [
        TensorSpec(name=f"{nbytes} {number}", dtype="float32", num_elements=nbytes // 4, op="sum")
        for nbytes in classes
        for number in range(AT_ONCE)
    ]
    tensors = session.register("all-reduce tuner", specs)
    assert isinstance(tensors, TensorGroup)  # the job has several workers
    seconds: dict[str, dict[int, list[float]]] = {way: {nbytes: [] for nbytes in classes} for way in ways}
    for way in ways:
        tensors.use_direct_allreduce(dict.fromkeys(range(len(tensors.shard_sizes())), way))
        for _ in range(REPEATS):
            for number, nbytes in enumerate(classes):
                some = range(number * AT_ONCE, (number + 1) * AT_ONCE)
                seconds[way][nbytes].append(_time(session, tensors, some))
    tensors.close()
    return seconds


def _time(session: Session, tensors: TensorGroup, indices: Iterable[int]) -> float:
    session.barrier()
    began_s = time.perf_counter()
    for index in indices:
        tensors.push(index)
    tensors.flush()
    tensors.pull_all()
    return time.perf_counter() - began_s


def fastest_ways(everybody: Sequence[Seconds]) -> dict[int, str]:
    """The fastest way of each size: of every repeat the slowest worker counts, and of these the fastest repeat.

    Args:
        everybody: The measurements of each worker. Ties go to the way that is named first.
    """
    first = everybody[0]

    def seconds(way: str, nbytes: int) -> float:
        repeats: list[float] = [
            max(of_workers) for of_workers in zip(*(each[way][nbytes] for each in everybody), strict=True)
        ]
        return min(repeats)

    classes = next(iter(first.values()))
    return {nbytes: min(first, key=partial(seconds, nbytes=nbytes)) for nbytes in classes}


def describe_ways(sizes: Sequence[int], ways: Mapping[int, str]) -> str:
    """A choice in words, by ranges of sizes in bytes.

    Args:
        sizes: Bytes of each shard.
        ways: The way of each shard.
    """
    by_size = sorted({(size_class(sizes[shard]), way) for shard, way in ways.items()})
    ranges: list[tuple[int, str]] = []
    for nbytes, way in by_size:
        if ranges and ranges[-1][1] == way:
            ranges.pop()
        ranges.append((nbytes, way))
    return ", ".join(f"{way} up to {format_bytes(nbytes)}" for nbytes, way in ranges)


def _from_json(text: bytes) -> Seconds:
    return {
        way: {int(nbytes): list(seconds) for nbytes, seconds in by_size.items()}
        for way, by_size in json.loads(text).items()
    }

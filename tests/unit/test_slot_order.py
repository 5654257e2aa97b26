"""Slots that tensors share in turn: nothing is overwritten early, and no tensor waits forever."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from coarse.client.memory.slot_order import find_predecessors
from coarse.profiler.partition import plan_partition
from coarse.schema import TensorSpec

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=12)


def slots_of(lengths, window_bytes):
    specs = [TensorSpec(name=str(i), dtype="float32", num_elements=n) for i, n in enumerate(lengths)]
    plan = plan_partition(specs, shard_bytes=64, gather_bytes=0, window_bytes=window_bytes)
    return plan, [
        (start, start + spec.nbytes) for start, spec in zip(plan.tensor_offsets, specs, strict=True)
    ]


@given(lengths, st.integers(1, 4000))
def test_slots_lie_in_the_window_or_in_that_of_the_largest_tensor(lengths, window_bytes):
    plan, slots = slots_of(lengths, window_bytes)
    assert max(end for _, end in slots) <= plan.slot_bytes
    assert plan.slot_bytes <= max(window_bytes, 4 * max(lengths)) + 63
    for shard in plan.shards:
        start, end = slots[shard.tensor]
        assert start <= shard.offset
        assert shard.offset + 4 * shard.num_elements <= end


def test_without_a_window_nobody_waits():
    _, slots = slots_of([100, 20, 30], 0)
    assert find_predecessors(slots) == [(), (), ()]


def test_the_first_tensor_waits_for_those_in_whose_place_it_comes():
    # From the last on: 64 bytes at 0, 64 at 64, and 128 bytes that need both places.
    _, slots = slots_of([32, 16, 16], 128)
    assert slots == [(0, 128), (64, 128), (0, 64)]
    assert find_predecessors(slots) == [(1, 2), (), ()]


@given(lengths, st.integers(1, 4000))
def test_predecessors_are_who_had_the_bytes_last(lengths, window_bytes):
    _, slots = slots_of(lengths, window_bytes)
    predecessors = find_predecessors(slots)
    owner = {}
    for tensor in reversed(range(len(slots))):
        taken = range(*slots[tensor])
        assert {owner[byte] for byte in taken if byte in owner} == set(predecessors[tensor])
        owner.update(dict.fromkeys(taken, tensor))


@given(lengths, st.integers(1, 2000), st.integers(0, 1000))
def test_workers_with_gradients_in_any_order_come_to_an_end(lengths, window_bytes, seed):
    """A model of two workers that send what they may, in whatever order their gradients come."""
    _, slots = slots_of(lengths, window_bytes)
    predecessors, generator = find_predecessors(slots), random.Random(seed)
    arrivals = [generator.sample(range(len(slots)), len(slots)) for _ in range(2)]
    waiting: list[set[int]] = [set(), set()]
    sent: list[set[int]] = [set(), set()]
    while any(arrivals) or any(waiting):
        worker = generator.randrange(2)
        if arrivals[worker]:
            waiting[worker].add(arrivals[worker].pop())
        elif not any(arrivals):  # both have come to the end of their backward pass: somebody must get on
            assert any(
                set(predecessors[tensor]) <= sent[0] & sent[1]
                for which in range(2)
                for tensor in waiting[which]
            )
        for tensor in sorted(waiting[worker], reverse=True):
            if set(predecessors[tensor]) <= sent[0] & sent[1]:
                waiting[worker].remove(tensor)
                sent[worker].add(tensor)

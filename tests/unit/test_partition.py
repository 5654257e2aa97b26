"""Partition plans: every byte in exactly one shard, none below the threshold, none across a cache line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.kernels._native import RING_LOG_CAPACITY
from coarse.profiler.partition import (
    ALGORITHMS,
    LOGGED_ALGORITHMS,
    MOST_LOGGED_SHARDS,
    SLOT_ALIGNMENT_BYTES,
    count_shards,
    plan_partition,
)
from coarse.schema import ITEM_BYTES, OPS, TensorSpec

MOST_ELEMENTS_OF_A_SHARD = (1 << 32) - 1  # of the wire format


def specs_of(dtypes_and_lengths):
    return [
        TensorSpec(name=str(i), dtype=dtype, num_elements=length, op="sum")
        for i, (dtype, length) in enumerate(dtypes_and_lengths)
    ]


tensors = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.integers(1, 20_000)), min_size=1, max_size=8
).map(specs_of)
partitions = st.fixed_dictionaries(
    {
        "shard_bytes": st.integers(64, 1 << 18),
        "gather_bytes": st.integers(0, 1 << 18),
        "algorithm": st.sampled_from(["auto", *ALGORITHMS]),
        "large_algorithm": st.sampled_from(ALGORITHMS),
    }
)


def shards_by_tensor(plan, num_tensors):
    return [[shard for shard in plan.shards if shard.tensor == tensor] for tensor in range(num_tensors)]


def nbytes(shard, specs):
    return shard.num_elements * ITEM_BYTES[specs[shard.tensor].dtype]


@given(tensors, partitions)
def test_each_byte_is_in_exactly_one_shard(specs, partition):
    plan = plan_partition(specs, **partition)
    for spec, start, shards in zip(
        specs, plan.tensor_offsets, shards_by_tensor(plan, len(specs)), strict=True
    ):
        end = start
        for shard in shards:
            assert shard.offset == end
            end += nbytes(shard, specs)
        assert end == start + spec.nbytes


@given(tensors, partitions, st.integers(0, 20_000 * 8))
def test_small_tensors_can_come_first(specs, partition, threshold_bytes):
    """Then wherever large ones begin, no small one lies behind."""
    plan = plan_partition(specs, **partition, small_first=True)
    usual = plan_partition(specs, **partition)
    assert plan.slot_bytes == usual.slot_bytes
    largest = [max(nbytes(shard, specs) for shard in own) for own in shards_by_tensor(plan, len(specs))]
    small = [index for index, length in enumerate(largest) if length < threshold_bytes]
    large = [index for index, length in enumerate(largest) if length >= threshold_bytes]
    assert max((plan.tensor_offsets[i] for i in small), default=-1) < min(
        (plan.tensor_offsets[i] for i in large), default=plan.slot_bytes
    )
    ends = {start + specs[i].nbytes for i, start in enumerate(plan.tensor_offsets)}
    assert len(ends) == len(specs)
    moved = [shard.offset - plan.tensor_offsets[shard.tensor] for shard in plan.shards]
    assert moved == [shard.offset - usual.tensor_offsets[shard.tensor] for shard in usual.shards]


@given(tensors, partitions)
def test_tensors_lie_behind_each_other_in_whole_cache_lines(specs, partition):
    plan = plan_partition(specs, **partition)
    ends = [*plan.tensor_offsets[1:], plan.slot_bytes]
    for spec, start, end in zip(specs, plan.tensor_offsets, ends, strict=True):
        assert start % SLOT_ALIGNMENT_BYTES == 0
        assert spec.nbytes <= end - start < spec.nbytes + SLOT_ALIGNMENT_BYTES
    assert [shard.tensor for shard in plan.shards] == sorted(shard.tensor for shard in plan.shards)


@given(tensors, partitions)
def test_no_shard_is_below_the_threshold_unless_its_tensor_is(specs, partition):
    plan = plan_partition(specs, **partition)
    for shard in plan.shards:
        assert nbytes(shard, specs) >= min(partition["shard_bytes"], specs[shard.tensor].nbytes)
        assert shard.offset % SLOT_ALIGNMENT_BYTES == 0


@given(tensors, partitions)
def test_shards_of_a_tensor_differ_by_a_cache_line_at_most_and_the_rest_of_one(specs, partition):
    for shards in shards_by_tensor(plan_partition(specs, **partition), len(specs)):
        sizes = [nbytes(shard, specs) for shard in shards]
        assert max(sizes) - min(sizes) < 2 * SLOT_ALIGNMENT_BYTES


@given(tensors, partitions)
def test_the_algorithm_is_the_one_asked_for_or_follows_from_the_size(specs, partition):
    plan = plan_partition(specs, **partition)
    for shard in plan.shards:
        asked = partition["algorithm"]
        size = specs[shard.tensor].nbytes
        by_size = "gather" if size <= partition["gather_bytes"] else partition["large_algorithm"]
        assert shard.algorithm == (by_size if asked == "auto" else asked)
    for shards in shards_by_tensor(plan, len(specs)):
        assert shards[0].algorithm != "gather" or len(shards) == 1


@pytest.mark.parametrize("algorithm", LOGGED_ALGORITHMS)
def test_shards_grow_until_the_logs_of_memory_devices_hold_them(algorithm):
    specs = [TensorSpec(name="large", dtype="float32", num_elements=3 << 30, op="mean")]
    plan = plan_partition(specs, shard_bytes=64 << 10, gather_bytes=0, algorithm=algorithm)
    sizes = {nbytes(shard, specs) for shard in plan.shards}
    assert MOST_LOGGED_SHARDS / 2 < len(plan.shards) <= MOST_LOGGED_SHARDS < RING_LOG_CAPACITY / 2
    assert sizes == {2 << 20}


def test_more_tensors_than_the_logs_hold_stay_whole():
    specs = [
        TensorSpec(name=f"tensor {number}", dtype="float32", num_elements=20, op="mean")
        for number in range(MOST_LOGGED_SHARDS + 1)
    ]
    plan = plan_partition(specs, shard_bytes=64, gather_bytes=0, algorithm="ring")
    assert len(plan.shards) == len(specs)


def test_shards_in_coherent_memory_keep_their_size():
    specs = [TensorSpec(name="large", dtype="float32", num_elements=1 << 30, op="mean")]
    plan = plan_partition(specs, shard_bytes=64 << 10, gather_bytes=0, algorithm="direct")
    assert len(plan.shards) == (4 << 30) // (64 << 10)


@given(tensors, partitions)
def test_the_plan_depends_on_nothing_else(specs, partition):
    renamed = [
        TensorSpec(name=f"other {spec.name}", dtype=spec.dtype, num_elements=spec.num_elements, op="max")
        for spec in specs
    ]
    assert plan_partition(specs, **partition) == plan_partition(renamed, **partition)


@pytest.mark.parametrize(
    ("tensor_bytes", "threshold", "num_shards"),
    [
        (1, 64, 1),
        (127, 64, 1),
        (128, 64, 2),
        (1 << 20, 1 << 18, 4),
        ((2 << 18) - 1, 1 << 18, 1),
        (1000, 100, 7),
    ],
)
def test_as_many_shards_as_fit_the_threshold(tensor_bytes, threshold, num_shards):
    assert count_shards(tensor_bytes, threshold) == num_shards


@pytest.mark.parametrize(("size", "algorithm"), [(1, "gather"), (4096, "gather"), (4097, "direct")])
def test_small_tensors_are_gathered(size, algorithm):
    plan = plan_partition(specs_of([("uint8", size)]), shard_bytes=64, gather_bytes=4096)
    assert {shard.algorithm for shard in plan.shards} == {algorithm}


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("length", [(1 << 32) - 1, 1 << 32, (1 << 33) - 2, 3 << 34])
def test_shards_of_huge_tensors_fit_the_wire_format(dtype, length):
    specs = specs_of([(dtype, length)])
    plan = plan_partition(specs, shard_bytes=1 << 32, gather_bytes=0, algorithm="gather")
    assert sum(shard.num_elements for shard in plan.shards) == length
    assert all(shard.num_elements <= MOST_ELEMENTS_OF_A_SHARD for shard in plan.shards)
    assert all(shard.offset % SLOT_ALIGNMENT_BYTES == 0 for shard in plan.shards)


@pytest.mark.parametrize("op", OPS)
def test_the_op_does_not_matter(op):
    spec = TensorSpec(name="a", dtype="float32", num_elements=1000, op=op)
    assert plan_partition([spec], shard_bytes=1024, gather_bytes=0).slot_bytes == 4032


def test_a_threshold_below_one_byte_is_refused():
    with pytest.raises(ValueError, match="shard_bytes=0 must be at least 1"):
        plan_partition(specs_of([("float32", 1)]), shard_bytes=0, gather_bytes=0)


def test_an_unknown_algorithm_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="'magic' must be one of auto, gather, direct, ring"):
        plan_partition(specs_of([("float32", 1)]), shard_bytes=1, gather_bytes=0, algorithm="magic")
    with pytest.raises(ValueError, match="'auto' for large tensors must be one of"):
        plan_partition(specs_of([("float32", 1)]), shard_bytes=1, gather_bytes=0, large_algorithm="auto")


def test_tables_have_no_slots_and_are_cut_at_rows():
    whole = TensorSpec(name="whole", dtype="float32", num_elements=100)
    table = TensorSpec(name="table", dtype="float32", num_elements=7 * 100_001, row_elements=7)
    plan = plan_partition([table, whole, table], shard_bytes=1024, gather_bytes=4096)
    assert plan.slot_bytes == 448
    assert plan.tensor_offsets[1] == 0
    assert plan.tensor_offsets[0] == plan.slot_bytes
    assert plan.tensor_offsets[2] >= plan.tensor_offsets[0] + table.nbytes
    for shards in (s for s in shards_by_tensor(plan, 3) if len(s) > 1):
        assert len(shards) == 16
        assert sum(shard.num_elements for shard in shards) == table.num_elements
        assert all(shard.num_elements % 7 == 0 for shard in shards)
        assert all(shard.offset % 64 == 0 for shard in shards)


@pytest.mark.parametrize(("row_elements", "op"), [(3, "mean"), (-1, "mean"), (5, "max")])
def test_rows_that_cannot_be_are_refused(row_elements, op):
    with pytest.raises(ValueError, match="table 't'"):
        TensorSpec(name="t", dtype="float32", num_elements=10, op=op, row_elements=row_elements)

"""Slots are in the memory devices to which their shards are routed, except slots of one page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coarse.profiler.partition import plan_partition
from coarse.profiler.routing import RoutingTable, route_shards
from coarse.schema import TensorSpec
from coarse.wire.slot_pieces import PIECE_BYTES, SlotPiece, slot_pieces

models = st.lists(st.integers(1, 3 << 20), min_size=1, max_size=12).map(
    lambda lengths: [
        TensorSpec(name=str(i), dtype="float32", num_elements=length) for i, length in enumerate(lengths)
    ]
)
tables = st.builds(
    RoutingTable,
    lat_proxy=st.integers(0, 3),
    bw_proxy=st.integers(0, 3),
    threshold_bytes=st.integers(0, 16 << 20),
)


def plan_of(specs):
    return plan_partition(specs, shard_bytes=1 << 20, gather_bytes=64 << 10, small_first=True)


@given(models, tables)
def test_pieces_are_whole_pages_but_for_the_last(specs, table):
    plan = plan_of(specs)
    pieces = slot_pieces(table, plan, specs, plan.slot_bytes)
    assert sum(piece.num_bytes for piece in pieces) == plan.slot_bytes
    assert all(piece.num_bytes > 0 for piece in pieces)
    assert all(piece.num_bytes % PIECE_BYTES == 0 for piece in pieces[:-1])


@given(models, tables)
def test_shards_lie_where_they_are_routed(specs, table):
    plan = plan_of(specs)
    pieces = slot_pieces(table, plan, specs, plan.slot_bytes)
    cut = pieces[0].num_bytes if len(pieces) > 1 else 0
    misplaced = 0
    for shard, device in zip(plan.shards, route_shards(table, plan, specs), strict=True):
        end = shard.offset + 4 * shard.num_elements
        for first, last, piece in ((0, cut, pieces[0]), (cut, plan.slot_bytes, pieces[-1])):
            if piece.device != device:
                misplaced += max(0, min(end, last) - max(shard.offset, first))
    # Half a page at the cut, and shards of one tensor that the threshold lies between.
    between = max(spec.nbytes for spec in specs)
    assert misplaced <= PIECE_BYTES // 2 + between


def test_without_small_tensors_all_lie_with_the_widest_link():
    specs = [TensorSpec(name="only", dtype="float32", num_elements=1 << 20)]
    plan = plan_of(specs)
    table = RoutingTable(lat_proxy=0, bw_proxy=1, threshold_bytes=1 << 19)
    assert slot_pieces(table, plan, specs, plan.slot_bytes) == [SlotPiece(1, 4 << 20)]


def test_without_large_tensors_all_lie_with_the_quickest_link():
    specs = [TensorSpec(name=str(i), dtype="float32", num_elements=1000) for i in range(5000)]
    plan = plan_of(specs)
    table = RoutingTable(lat_proxy=0, bw_proxy=1, threshold_bytes=1 << 19)
    assert slot_pieces(table, plan, specs, plan.slot_bytes) == [SlotPiece(0, plan.slot_bytes)]

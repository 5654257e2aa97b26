"""The memory devices that hold a worker's slots if its gradients are routed (docs/design/gpu.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coarse.profiler.partition import PartitionPlan
from coarse.profiler.routing import RoutingTable
from coarse.schema import ITEM_BYTES, TensorSpec

PIECE_BYTES = 2 << 20
"""All pieces but the last are multiples of it: whole pages of every GPU."""


class SlotPiece(NamedTuple):
    """A run of a worker's slots, and the memory device that holds it."""

    device: int
    num_bytes: int


def slot_pieces(
    table: RoutingTable, plan: PartitionPlan, specs: Sequence[TensorSpec], num_bytes: int
) -> list[SlotPiece]:
    """Cuts slots, in which small tensors come first, at the end of a page near the table's threshold.

    Thus each shard lies on the memory device of its route, except for the shards of at most one page.

    Args:
        table: The worker's routing table.
        plan: Layout of the tensors, small ones first.
        specs: The tensors.
        num_bytes: Size of all slots.
    """
    if table.lat_proxy == table.bw_proxy:
        return [SlotPiece(table.bw_proxy, num_bytes)]
    large = [
        shard.offset
        for shard in plan.shards
        if shard.num_elements * ITEM_BYTES[specs[shard.tensor].dtype] >= table.threshold_bytes
    ]
    cut = min(round(min(large, default=num_bytes) / PIECE_BYTES) * PIECE_BYTES, num_bytes)
    pieces = [SlotPiece(table.lat_proxy, cut), SlotPiece(table.bw_proxy, num_bytes - cut)]
    return [piece for piece in pieces if piece.num_bytes > 0]

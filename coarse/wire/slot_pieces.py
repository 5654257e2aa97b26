"""On which memory devices the slots of a worker lie, where its gradients are routed (docs/design/gpu.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from coarse.profiler.partition import PartitionPlan
from coarse.profiler.routing import RoutingTable
from coarse.schema import ITEM_BYTES, TensorSpec

if TYPE_CHECKING:
    from coarse.wire.device_job import DeviceJob
    from coarse.wire.registration import GroupSchema

PIECE_BYTES = 2 << 20
"""Pieces that others follow are multiples of it: whole pages of every GPU."""


class SlotPiece(NamedTuple):
    """A run of a worker's slots, and the memory device that has it."""

    device: int
    num_bytes: int


def slot_pieces(
    table: RoutingTable, plan: PartitionPlan, specs: Sequence[TensorSpec], num_bytes: int
) -> list[SlotPiece]:
    """Cuts slots in which small tensors come first at the table's threshold, where a page ends.

    So a shard lies with the memory device that it is routed to, but for those of one page at the most.

    Args:
        table: Of the worker.
        plan: Where tensors lie, small ones first.
        specs: The tensors.
        num_bytes: Of all slots.
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


def pieces_of_slots(schema: GroupSchema, job: DeviceJob, num_bytes: int) -> dict[int, list[SlotPiece]]:
    """Which memory devices have the slots of each worker of a node.

    Args:
        schema: Of the group; its routes are in order.
        job: Of any of the devices.
        num_bytes: Of the slots of one worker.
    """
    clients = range(job.num_clients)
    if not schema.routes:
        return {client: [SlotPiece(job.local_device(client), num_bytes)] for client in clients}
    plan = schema.partition()
    return {
        client: slot_pieces(table, plan, schema.specs, num_bytes)
        for client, table in zip(clients, schema.routes, strict=True)
    }


def check_routes(schema: GroupSchema, job: DeviceJob, *, is_on_gpu: bool) -> None:
    """Whether slots can lie where a group's routes lead.

    Raises:
        ValueError: If they cannot; says why.
    """
    if not schema.routes:
        return
    furthest = max(max(table.lat_proxy, table.bw_proxy) for table in schema.routes)
    if len(schema.routes) != job.num_clients or furthest >= job.num_devices:
        raise ValueError(
            f"{schema.name}: {len(schema.routes)} workers have routes to memory devices up to md{furthest}; this "
            f"node has {job.num_clients} and {job.num_devices}"
        )
    if not is_on_gpu or schema.window_bytes or schema.is_open:
        raise ValueError(
            f"{schema.name}: slots lie where they are routed in the memory of GPUs, unless tensors take turns in "
            "them or other workers see them"
        )

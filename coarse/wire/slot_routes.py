"""The places of a registered group's slots on the memory devices of a node (docs/design/gpu.md)."""

from __future__ import annotations

from coarse.wire.device_job import DeviceJob
from coarse.wire.registration import GroupSchema
from coarse.wire.slot_pieces import SlotPiece, slot_pieces


def pieces_of_slots(schema: GroupSchema, job: DeviceJob, num_bytes: int) -> dict[int, list[SlotPiece]]:
    """The memory devices that hold the slots of each worker of a node.

    Args:
        schema: The group's schema, with valid routes.
        job: The job of any of the devices.
        num_bytes: Size of one worker's slots.
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
    """Checks that slots can lie on the memory devices of a group's routes.

    Raises:
        ValueError: If they cannot; gives the reason.
    """
    if not schema.routes:
        return
    furthest = max(max(table.lat_proxy, table.bw_proxy) for table in schema.routes)
    if len(schema.routes) != job.num_clients or furthest >= job.num_devices:
        raise ValueError(
            f"{schema.name}: {len(schema.routes)} workers have routes to memory devices up to md{furthest}, "
            f"but this node has {job.num_clients} workers and {job.num_devices} memory devices"
        )
    if not is_on_gpu or schema.window_bytes or schema.is_open:
        raise ValueError(
            f"{schema.name}: routes need slots in GPU memory that tensors do not share and other workers do "
            "not access"
        )

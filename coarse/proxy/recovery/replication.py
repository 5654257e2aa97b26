"""Replicas of memory devices' contents, and their transfer to a device that replaces a lost one.

With one replica, the next device of the ring keeps an extra copy of each device's contents
(docs/design/recovery.md). The home device holds parameters and states of all groups; every device holds stored
values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from coarse.errors import ProtocolError
from coarse.kernels import _native
from coarse.proxy.memory import DeviceMemories, DeviceMemory
from coarse.proxy.recovery.persistent_groups import DeviceContents, PersistentGroups
from coarse.wire.device_job import HOME_DEVICE, DeviceJob
from coarse.wire.messages import Message, int_field, text_field
from coarse.wire.registration import GroupSchema, RecoveredUpdates
from coarse.wire.segments import Segment, pack
from coarse.wire.storage import holders_of

logger = logging.getLogger(__name__)

REFILL_GROUP = "refill_group"
REFILL_VALUE = "refill_value"

SendToPeer = Callable[[int, Message, Sequence[int]], None]
"""Sends a message and descriptors to one other memory device."""


class Replication:
    """One memory device's handling of replicas. Used from the control thread alone.

    Args:
        job: The device's place in the session.
        memories: Memories for contents that the device receives back.
        contents: The device's contents.
        send: Sends a message to another device.
    """

    def __init__(
        self, job: DeviceJob, memories: DeviceMemories, contents: DeviceContents, send: SendToPeer
    ) -> None:
        self._job = job
        self._memories = memories
        self._contents = contents
        self._send = send

    def survives(self, lost: Collection[int]) -> bool:
        """Whether all contents survive the loss of these devices."""
        return not lost or (self._job.replicas > 0 and len(lost) == 1)

    def finish(self, proxy: _native.Proxy, lost: Collection[int]) -> None:
        """Brings this device's contents of all groups to one whole step. The home device goes first.

        Args:
            proxy: The stopped proxy; all workers have ended.
            lost: Devices that have ended too.
        """
        lost_clients = [client for device in lost for client in self._job.clients_of[device]]
        if self._job.is_home:
            self._record_updates(self._contents.groups, proxy.finish_updates(lost_clients))
        if self._job.keeps_replica:
            is_owner_lost = HOME_DEVICE in lost
            self._record_updates(self._contents.replicas, proxy.finish_replicas(lost_clients, is_owner_lost))

    def _record_updates(
        self, groups: PersistentGroups, finished: list[tuple[int, int, list[int], str]]
    ) -> None:
        for problem in groups.record_updates(finished):
            logger.warning("[md%s] cannot keep %s", self._job.device, problem)

    def refill(self, device: int) -> None:
        """Sends the replacement of a lost device that device's contents, if this device has copies of them."""
        if device == HOME_DEVICE and self._job.keeps_replica:
            for kept, updates in self._contents.replicas.with_updates():
                extents, fds = pack(kept.segments.values())
                message: Message = {
                    "type": REFILL_GROUP,
                    "schema": kept.schema.to_message(0),
                    "updates": updates.to_message(),
                    "names": list(kept.segments),
                    "extents": extents,
                }
                self._send(device, message, fds)
        storage = self._contents.storage
        for key in storage.keys():  # noqa: SIM118  # a Storage is no dictionary
            value = storage.get(key).segment
            if value is not None and device in holders_of(key, self._job.num_devices, self._job.replicas):
                extents, fds = pack([value])
                message = {"type": REFILL_VALUE, "key": key, "num_bytes": value.num_bytes}
                self._send(device, message | {"extents": extents}, fds)

    def take(self, message: Message, segments: Sequence[Segment]) -> None:
        """Copies contents that another device sends, because this device has replaced a lost one.

        Raises:
            OutOfDeviceMemoryError: If they do not fit.
            ProtocolError: If the message is not of this kind.
        """
        if message["type"] == REFILL_VALUE:
            key = text_field(message, "key")
            num_bytes = int_field(message, "num_bytes", low=1)
            label = f"stored tensor {key[:100]!r}"
            self._contents.storage.put(key, _copy(self._memories.own, label, segments[0], num_bytes))
            return
        schema_message, updates = message.get("schema"), message.get("updates")
        if not isinstance(schema_message, dict) or not isinstance(updates, dict):
            raise ProtocolError("a group comes back without saying what it is")
        schema = GroupSchema.from_message(schema_message)
        copies = {
            name: _copy(self._memories.common, f"{name} of {schema.name}", segment, segment.num_bytes)
            for name, segment in zip(message["names"], segments, strict=True)
        }
        recovered = RecoveredUpdates.from_message(updates)
        self._contents.groups.restore(schema, copies, recovered)
        logger.info("[md%s] has %s again, of step %d", self._job.device, schema.name, recovered.step)


def _copy(memory: DeviceMemory, label: str, segment: Segment, num_bytes: int) -> Segment:
    """Copies another memory device's segment; small values of a device on a GPU stay in host memory."""
    is_of_kind = memory.is_mappable or bool(segment.gpu)
    copy = memory.allocate(label, num_bytes) if is_of_kind else memory.allocate_host(label, num_bytes)
    _native.copy_region(
        memory.tensor_memory() if is_of_kind else None, segment.region, copy.region, num_bytes
    )
    return copy

"""The workers of a node that are lost while the others go on (docs/design/membership.md)."""

from __future__ import annotations

from coarse.wire.device_job import DeviceJob
from coarse.wire.failure_messages import WorkerLoss

DRAINED = "drained"
"""A device has taken the last contributions of a lost worker."""


class Membership:
    """One memory device's knowledge of lost workers. Used from the control thread alone.

    Args:
        job: The device's place in the session.
    """

    def __init__(self, job: DeviceJob) -> None:
        self._job = job
        self._losses: dict[int, WorkerLoss] = {}
        self._drained: dict[
            int, set[int]
        ] = {}  # devices, by client; others may know of a loss before this one

    @property
    def lost(self) -> frozenset[int]:
        """Clients that are lost."""
        return frozenset(self._losses)

    @property
    def losses(self) -> tuple[WorkerLoss, ...]:
        """The losses in their order."""
        return tuple(self._losses.values())

    @property
    def num_left(self) -> int:
        """Workers of the node that are not lost."""
        return self._job.num_clients - len(self._losses)

    @property
    def are_enough(self) -> bool:
        """Whether those that are left may go on."""
        return self.num_left >= self._job.min_workers

    def lose(self, client: int, loss: WorkerLoss) -> None:
        """Notes that a worker is lost."""
        self._losses[client] = loss

    def drain(self, client: int, device: int) -> bool:
        """Notes that a device has taken a worker's last contributions; returns whether now all devices have."""
        devices = self._drained.setdefault(client, set())
        devices.add(device)
        return len(devices) == self._job.num_devices

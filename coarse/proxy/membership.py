"""Lost workers, without which the others go on, and newcomers (docs/design/membership.md)."""

from __future__ import annotations

from coarse.wire.device_job import DeviceJob
from coarse.wire.failure_messages import WorkerLoss

DRAINED = "drained"
"""A device has taken the last contributions of a lost worker."""


class Membership:
    """One memory device's knowledge of lost workers and newcomers. Used from the control thread alone.

    A client's place can have several workers, one after the other; some have none at the start. Messages name a lost
    worker by its process, a newcomer by its entry, because one process may try to enter several times.

    Args:
        job: The device's place in the session.
    """

    def __init__(self, job: DeviceJob) -> None:
        self._job = job
        self._losses: dict[int, WorkerLoss] = {}
        self._unused = set(job.vacant)  # clients that never had a worker
        self._replaced: list[WorkerLoss] = []
        self._elsewhere: dict[int, WorkerLoss] = {}  # of other nodes, by rank
        # Devices, by client and process; others may know of a loss before this one.
        self._drained: dict[tuple[int, int], set[int]] = {}
        self._newcomers: dict[int, str] = {}
        self._waiting: set[int] = set()
        self._entering: set[int] = set()

    @property
    def lost(self) -> frozenset[int]:
        """Clients whose places have no member: it is lost, or has left, or there was none."""
        return frozenset(self._unused | self._losses.keys())

    @property
    def losses(self) -> tuple[WorkerLoss, ...]:
        """All losses of all nodes; those whose places have a member again come first, then other nodes'."""
        return (*self._replaced, *self._elsewhere.values(), *self._losses.values())

    @property
    def num_left(self) -> int:
        """Members of all nodes that are not lost."""
        return self._job.num_workers - len(self.lost) - len(self._elsewhere)

    @property
    def are_enough(self) -> bool:
        """Whether enough workers are left on all nodes."""
        return self.num_left >= self._job.min_workers

    @property
    def is_node_empty(self) -> bool:
        """Whether all workers of this node are lost."""
        return len(self.lost) == self._job.num_clients

    def lose(self, client: int, loss: WorkerLoss) -> None:
        """Notes that a worker is lost."""
        self._entering.discard(client)
        self._losses[client] = loss

    def lose_elsewhere(self, loss: WorkerLoss) -> bool:
        """Notes the loss of a worker of another node; returns False if it was known."""
        is_new = loss.rank not in self._elsewhere
        self._elsewhere[loss.rank] = loss
        return is_new

    def pid(self, client: int) -> int:
        """The process of the lost worker of a place; 0 if there was none."""
        loss = self._losses.get(client)
        return 0 if loss is None else loss.pid

    def drain(self, client: int, pid: int, device: int) -> bool:
        """Notes that a device has taken a worker's last contributions; returns whether now all devices have."""
        devices = self._drained.setdefault((client, pid), set())
        devices.add(device)
        return len(devices) == self._job.num_devices

    # Newcomers.

    @property
    def newcomers(self) -> dict[int, str]:
        """The entries of workers that are no members yet, by client."""
        return dict(self._newcomers)

    def is_vacant(self, client: int) -> bool:
        """Whether a newcomer may take a place: it has no worker, and no device has a contribution of the last one."""
        if client not in self.lost or client in self._newcomers:
            return False
        return len(self._drained.get((client, self.pid(client)), ())) == self._job.num_devices

    def admit(self, client: int, entry: str) -> None:
        """Notes that a newcomer has a place."""
        self._newcomers[client] = entry
        self._entering.add(client)

    def wait(self, client: int) -> None:
        """Notes that a newcomer waits until it is a member."""
        self._waiting.add(client)

    def may_be_member(self, client: int) -> bool:
        """Whether a newcomer waits, so that any device may have made it a member."""
        return client in self._waiting

    def enter(self, client: int) -> None:
        """Notes that a newcomer has begun to take part."""
        self._entering.discard(client)

    @property
    def entering(self) -> frozenset[int]:
        """Clients that have entered a place and have not begun to take part."""
        return frozenset(self._entering)

    def settle(self, client: int) -> None:
        """Notes that a newcomer is a member."""
        del self._newcomers[client]
        self._waiting.discard(client)
        self._unused.discard(client)
        if client in self._losses:
            self._replaced.append(self._losses.pop(client))

    def forget(self, client: int) -> None:
        """Notes that a newcomer has ended before it was a member."""
        self._entering.discard(client)
        del self._newcomers[client]
        self._waiting.discard(client)

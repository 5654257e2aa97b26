"""A memory device's answers to `coarse status` and to the dashboard, from the responder's thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from coarse.env import Attempt
from coarse.metrics.values import Metrics
from coarse.status.address import MEMORY_DEVICE, Address, job_id
from coarse.status.responder import METRICS, Report, try_respond
from coarse.wire.device_job import DeviceJob


class DeviceStatus:
    """The status of one memory device, through all attempts of its job.

    Args:
        job: The device's place in the session.
    """

    def __init__(self, job: DeviceJob) -> None:
        self._device = job.device
        self._serves = [job.rank(client) for client in job.local_clients]
        self._reserved: Callable[[], dict[str, int]] = dict
        self._read: Callable[[], Metrics] | None = None
        self._lost: Report = {}

    def follow(self, reserved: Callable[[], dict[str, int]]) -> None:
        """Reports about another attempt from now on.

        Args:
            reserved: Bytes that the device has reserved, by their use; called in the responder's thread.
        """
        self._reserved, self._read = reserved, None

    def serve_metrics(self, read: Callable[[], Metrics]) -> None:
        """Answers with the metrics of the node, if this is its home device.

        Args:
            read: Reads them; called in the responder's thread.
        """
        self._read = read

    def tell_loss(self, text: str) -> None:
        """Reports the failure that ends this attempt from now on."""
        self._lost = {"lost": text, "lost_s": time.time()}

    def respond(self) -> None:
        """Begins to answer, until this process ends, if the system allows it."""
        address = Address.of_this_process(job_id(Attempt.from_environment().job), MEMORY_DEVICE, self._device)
        try_respond(address, self._report, more={METRICS: self._metrics})

    def _report(self) -> Report:
        return {"serves": self._serves, "reserved": self._reserved(), **self._lost}

    def _metrics(self) -> Report:
        return {} if self._read is None else {METRICS: dict(self._read())}

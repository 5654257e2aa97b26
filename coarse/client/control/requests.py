"""A worker's requests to a memory device outside of registration."""

from __future__ import annotations

from coarse.client.control.connection import DeviceConnection, SilentDeviceError, collect_replies
from coarse.client.control.failure_detector import FailureDetector
from coarse.metrics.writer import MetricsWriter
from coarse.wire.messages import Received


class Requests:
    """Waits for replies of memory devices.

    Args:
        rank: This worker's rank.
        timeout_s: Longest wait in seconds.
        failure_detector: Checks for devices that make no progress.
        metrics: Counts the waits.
    """

    def __init__(
        self, rank: int, timeout_s: float, failure_detector: FailureDetector, metrics: MetricsWriter
    ) -> None:
        self._metrics = metrics
        self._rank = rank
        self._timeout_s = timeout_s
        self._failure_detector = failure_detector

    def wait_for(self, connection: DeviceConnection, kind: str, about: str) -> Received:
        """The device's next message of `kind`; `about` describes its subject, for error messages.

        Raises:
            SyncTimeoutError: If none comes in time.
            CoarseError: If the device reports an error or is lost.
        """
        try:
            with self._metrics.waiting_for_answer():
                replies = collect_replies(
                    [connection],
                    kind=kind,
                    group=None,
                    timeout_s=self._timeout_s,
                    what=f"worker {self._rank}: {about}",
                    on_silence=self._failure_detector.check_heartbeats,
                )
        except SilentDeviceError as error:
            raise self._failure_detector.explain(error) from error
        return replies[connection.device]

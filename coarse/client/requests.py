"""What a worker asks a memory device outside of registration, and waits for."""

from __future__ import annotations

from coarse.client.connection import DeviceConnection, SilentDeviceError, collect_replies
from coarse.client.failure_detector import FailureDetector
from coarse.wire.messages import Received


class Requests:
    """Waits for answers of memory devices.

    Args:
        rank: This worker's.
        timeout_s: Longest wait.
        failure_detector: Is told of a device that stands still.
    """

    def __init__(self, rank: int, timeout_s: float, failure_detector: FailureDetector) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._failure_detector = failure_detector

    def wait_for(self, connection: DeviceConnection, kind: str, about: str) -> Received:
        """The device's next message of `kind`; `about` says what it is about, for errors.

        Raises:
            SyncTimeoutError: If none comes in time.
            CoarseError: What the device says has gone wrong, or that it is lost.
        """
        try:
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

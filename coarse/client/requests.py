"""What a worker asks a memory device outside of registration, and waits for."""

from __future__ import annotations

from coarse.client.connection import DeviceConnection, SilentDeviceError, collect_replies
from coarse.client.failure_detector import Losses
from coarse.wire.messages import Received


class Questions:
    """Waits for answers of memory devices.

    Args:
        rank: This worker's.
        timeout_s: Longest wait.
        losses: Is told of a device that stands still.
    """

    def __init__(self, rank: int, timeout_s: float, losses: Losses) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._losses = losses

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
                on_silence=self._losses.check_heartbeats,
            )
        except SilentDeviceError as error:
            raise self._losses.explain(error) from error
        return replies[connection.device]

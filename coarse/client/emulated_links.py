"""A worker's view of the links of an emulated session (docs/design/emulation.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from coarse.client.connection import DeviceConnection
from coarse.client.pacing import LoggedTransfer, PacingReport, ServedTransfer
from coarse.client.requests import Requests
from coarse.kernels import _native
from coarse.machine.emulation import Emulation
from coarse.machine.links import Bucket

_Read = TypeVar("_Read")


class EmulatedLinks:
    """Changes emulated links and reads their transfers.

    Args:
        emulation: The emulated machine; None for real links, where every method raises ValueError.
        connection: Connection to a memory device; all devices share the links.
        requests: Waits for the device's replies.
    """

    def __init__(self, emulation: Emulation | None, connection: DeviceConnection, requests: Requests) -> None:
        self._emulation = emulation
        self._connection = connection
        self._requests = requests

    def set_bandwidth(self, bucket: str, gbytes_per_s: float) -> None:
        """Changes a capacity for all transfers that begin after the call.

        Raises:
            ValueError: If no such bucket exists, or the bandwidth is not positive.
        """
        if self._emulation is None:
            raise ValueError("only the links of an emulated session can be changed; set COARSE_MACHINE")
        number = self._emulation.bucket_number(bucket)
        Bucket(name=bucket, gbytes_per_s=gbytes_per_s)  # raises on invalid values
        self._connection.send({"type": "set_bandwidth", "bucket": number, "gbytes_per_s": gbytes_per_s})
        self._requests.wait_for(self._connection, "bandwidth_set", f"a change of {bucket}")

    def pacing(self) -> PacingReport:
        """How exactly the links have been paced so far."""
        if self._emulation is None:
            raise ValueError("only an emulated session paces its links; set COARSE_MACHINE")
        self._connection.send({"type": "pacing"})
        message = self._requests.wait_for(self._connection, "pacing", "pacing of the links").message
        num_arrivals = int(message["num_arrivals"])
        return PacingReport(
            num_arrivals=num_arrivals, mean_lateness_us=message["lateness_ns"] / 1e3 / max(1, num_arrivals)
        )

    def transfers(self) -> list[LoggedTransfer]:
        """The first transfers, up to the log's size."""
        return [LoggedTransfer(*row) for row in self._read(_native.read_transfers)]

    def served_transfers(self, since_us: float) -> tuple[float, list[ServedTransfer]]:
        """The newest transfers that ended after `since_us`.

        Returns:
            The time on the emulated machine, and a few transfers for each path and size class.
        """
        now_us, rows = self._read(lambda fd: _native.read_served_transfers(fd, since_us))
        return now_us, [ServedTransfer(*row) for row in rows]

    def _read(self, read: Callable[[int], _Read]) -> _Read:
        if self._emulation is None:
            raise ValueError("only an emulated session records its transfers; set COARSE_MACHINE")
        self._connection.send({"type": "transfers"})
        reply = self._requests.wait_for(self._connection, "transfers", "the log of transfers")
        try:
            return read(reply.fds[0])
        finally:
            reply.close()

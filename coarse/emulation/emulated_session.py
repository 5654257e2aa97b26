"""A worker's view of an emulated session (docs/design/emulation.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from coarse.emulation.machine import Emulation
from coarse.emulation.pacing import LoggedTransfer, PacingReport, ServedTransfer
from coarse.kernels import _native
from coarse.machine.links import Bucket, LinkTable

_Read = TypeVar("_Read")


class Reply(Protocol):
    """A memory device's answer."""

    @property
    def message(self) -> dict[str, Any]:
        """Its fields."""

    @property
    def fds(self) -> list[int]:
        """Its descriptors, which close() closes."""

    def close(self) -> None:
        """Closes the descriptors."""


class AskHome(Protocol):
    """Sends a message to the home device and waits for its answer, as Client.ask_home()."""

    def __call__(self, message: dict[str, Any], kind: str, about: str) -> Reply:
        """The answer of type `kind`; `about` is the subject for error messages."""


class EmulatedSession:
    """The machine that a session emulates: changes its links and reads their transfers.

    Args:
        emulation: The machine's links and dilation.
        ask_home: Asks a memory device; all devices share the links.
    """

    def __init__(self, emulation: Emulation, ask_home: AskHome) -> None:
        self.emulation = emulation
        """The same on every process of the job."""
        self._ask_home = ask_home

    @property
    def machine(self) -> str:
        """Name of the machine."""
        return self.emulation.machine

    @property
    def links(self) -> LinkTable:
        """The node's links as the session started; set_bandwidth() does not change them."""
        return self.emulation.links

    @property
    def job_links(self) -> LinkTable:
        """The links of all nodes, likewise. transfers() and set_bandwidth() name its endpoints and buckets."""
        return self.emulation.job_links

    @property
    def time_dilation(self) -> float:
        """Real seconds for each second of the machine."""
        return self.emulation.time_dilation

    def set_bandwidth(self, bucket: str, gbytes_per_s: float) -> None:
        """Changes a capacity for all transfers that begin after the call.

        Args:
            bucket: Name in `job_links.buckets`.
            gbytes_per_s: In the machine's time, not in dilated time; positive.

        Raises:
            ValueError: If no such bucket exists, or the bandwidth is not positive.
        """
        number = self.emulation.bucket_number(bucket)
        Bucket(name=bucket, gbytes_per_s=gbytes_per_s)  # raises on invalid values
        request = {"type": "set_bandwidth", "bucket": number, "gbytes_per_s": gbytes_per_s}
        self._ask_home(request, "bandwidth_set", f"a change of {bucket}")

    def pacing(self) -> PacingReport:
        """How exactly the links have been paced so far."""
        message = self._ask_home({"type": "pacing"}, "pacing", "pacing of the links").message
        num_arrivals = int(message["num_arrivals"])
        return PacingReport(
            num_arrivals=num_arrivals, mean_lateness_us=message["lateness_ns"] / 1e3 / max(1, num_arrivals)
        )

    def transfers(self) -> list[LoggedTransfer]:
        """The first COARSE_TRANSFER_LOG transfers."""
        return [LoggedTransfer(*row) for row in self._read(_native.read_transfers)]

    def served_transfers(self, since_us: float = 0.0) -> tuple[float, list[ServedTransfer]]:
        """The newest transfers that ended after `since_us`.

        Returns:
            The machine's time since the session started, and a few transfers for each path and size class.
        """
        now_us, rows = self._read(lambda fd: _native.read_served_transfers(fd, since_us))
        return now_us, [ServedTransfer(*row) for row in rows]

    def _read(self, read: Callable[[int], _Read]) -> _Read:
        reply = self._ask_home({"type": "transfers"}, "transfers", "the log of transfers")
        try:
            return read(reply.fds[0])
        finally:
            reply.close()

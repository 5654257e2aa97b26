"""The links of an emulated session, as memory devices share them (docs/design/emulation.md)."""

from __future__ import annotations

from coarse.errors import ProtocolError
from coarse.kernels import _native
from coarse.machine.emulation import Emulation
from coarse.wire.messages import Message, int_field


def write_link_table(fd: int, emulation: Emulation) -> None:
    """Writes the link table into memory of link_table_bytes(), before anybody else maps it."""
    _native.write_link_table(
        fd,
        emulation.time_dilation,
        [bucket.gbytes_per_s for bucket in emulation.links.buckets],
        [
            [None if path is None else (path.latency_us, path.buckets) for path in row]
            for row in emulation.links.paths
        ],
        emulation.num_logged,
    )


class PacedLinks:
    """Answers what workers ask of the links. Used from the control thread.

    Args:
        fd: A written link table; stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._pacer = _native.Pacer(fd)

    def set_bandwidth(self, message: Message) -> Message:
        """Changes a bucket for every transfer that begins from now on.

        Raises:
            ProtocolError: If there is no such bucket, or the bandwidth cannot be.
        """
        bandwidth = message.get("gbytes_per_s")
        if not isinstance(bandwidth, int | float):
            raise ProtocolError("a bandwidth is no number")
        try:
            self._pacer.set_bandwidth(int_field(message, "bucket"), bandwidth)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        return {"type": "bandwidth_set"}

    def report(self) -> Message:
        """How late arrivals were noticed, of all memory devices together."""
        num_arrivals, lateness_ns = self._pacer.arrivals()
        return {"type": "pacing", "num_arrivals": num_arrivals, "lateness_ns": lateness_ns}

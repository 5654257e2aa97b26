"""The links of an emulated session, shared by its memory devices (docs/design/emulation.md)."""

from __future__ import annotations

from coarse.emulation.machine import Emulation
from coarse.errors import ProtocolError
from coarse.kernels import _native


def link_table_bytes(emulation: Emulation) -> int:
    """Size of the link table."""
    links = emulation.job_links
    return _native.link_table_bytes(links.num_endpoints, len(links.buckets), emulation.num_logged)


def write_link_table(fd: int, emulation: Emulation) -> None:
    """Writes the link table into memory of link_table_bytes(), before other processes map it."""
    _native.write_link_table(
        fd,
        emulation.time_dilation,
        [bucket.gbytes_per_s for bucket in emulation.job_links.buckets],
        [
            [None if path is None else (path.latency_us, path.buckets) for path in row]
            for row in emulation.job_links.paths
        ],
        emulation.num_logged,
    )


class PacedLinks:
    """Answers workers' requests about the links. Used from the control thread.

    Args:
        fd: Descriptor of a written link table; the caller closes it.
    """

    def __init__(self, fd: int) -> None:
        self._pacer = _native.Pacer(fd)

    def set_bandwidth(self, bucket: int, gbytes_per_s: object) -> dict[str, object]:
        """Changes a bucket for every transfer that begins after the call; returns the answer.

        Raises:
            ProtocolError: If the bucket does not exist or the bandwidth is invalid.
        """
        if not isinstance(gbytes_per_s, int | float):
            raise ProtocolError("a bandwidth is not a number")
        try:
            self._pacer.set_bandwidth(bucket, gbytes_per_s)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        return {"type": "bandwidth_set"}

    def report(self) -> dict[str, object]:
        """The detection delay of arrivals, over all memory devices."""
        num_arrivals, lateness_ns = self._pacer.arrivals()
        return {"type": "pacing", "num_arrivals": num_arrivals, "lateness_ns": lateness_ns}

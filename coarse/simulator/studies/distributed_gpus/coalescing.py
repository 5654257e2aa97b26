"""How a GPU's memory controller merges remote accesses into requests of up to 16 values (section 6.6.3).

Writes leave through one write-combining buffer: a value that continues the last one, in the same packet, joins it.
Reads fetch whole packets: a value in the packet of the last read needs no request of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PACKET_VALUES, INT_BYTES, LONG_BYTES = 16, 4, 8
PACKET_BYTES = PACKET_VALUES * INT_BYTES
"""Of Table 6.1, which counts values of 4 bytes."""


@dataclass(frozen=True, slots=True)
class Request:
    """Consecutive bytes of one packet."""

    address: int
    nbytes: int


@dataclass(slots=True)
class WriteCombiner:
    """The buffer between a GPU's stores and its link."""

    packet_bytes: int = PACKET_BYTES
    open_request: Request | None = None

    def write(self, address: int, nbytes: int) -> Request | None:
        """Takes one value; returns the request that it displaces, if any."""
        if self.joins(address):
            assert self.open_request is not None
            self.open_request = Request(self.open_request.address, self.open_request.nbytes + nbytes)
            return None
        displaced, self.open_request = self.open_request, Request(address, nbytes)
        return displaced

    def joins(self, address: int) -> bool:
        """Whether a value continues the open request without leaving its packet."""
        last = self.open_request
        if last is None:
            return False
        return address == last.address + last.nbytes and is_same_packet(
            address, last.address, self.packet_bytes
        )

    def flush(self) -> Request | None:
        """Takes the open request out, as a fence does."""
        flushed, self.open_request = self.open_request, None
        return flushed


def is_same_packet(one: int, other: int, packet_bytes: int = PACKET_BYTES) -> bool:
    """Whether two addresses lie in one packet."""
    return one // packet_bytes == other // packet_bytes


def write_requests(addresses: Iterable[int], value_bytes: int) -> list[Request]:
    """The requests of a stream of stores, the last one by a fence."""
    combiner = WriteCombiner(packet_bytes=PACKET_VALUES * value_bytes)
    displaced = [combiner.write(address, value_bytes) for address in addresses]
    return [request for request in (*displaced, combiner.flush()) if request is not None]


def read_requests(addresses: Iterable[int], value_bytes: int = INT_BYTES) -> list[Request]:
    """The requests of a stream of loads: whole packets."""
    packet_bytes = PACKET_VALUES * value_bytes
    requests: list[Request] = []
    for address in addresses:
        if not requests or not is_same_packet(address, requests[-1].address, packet_bytes):
            requests.append(Request(address // packet_bytes * packet_bytes, packet_bytes))
    return requests

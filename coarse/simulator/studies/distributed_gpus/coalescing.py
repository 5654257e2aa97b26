"""How a GPU's memory controller merges remote accesses into requests of up to 64 bytes (section 6.6.3).

Writes leave through one write-combining buffer: a value that continues the last one, in the same packet, joins it.
Reads fetch whole packets: a value in the packet of the last read needs no request of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PACKET_BYTES = 64


@dataclass(frozen=True, slots=True)
class Request:
    """Consecutive bytes of one packet."""

    address: int
    nbytes: int


@dataclass(slots=True)
class WriteCombiner:
    """The buffer between a GPU's stores and its link."""

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
        return address == last.address + last.nbytes and is_same_packet(address, last.address)

    def flush(self) -> Request | None:
        """Takes the open request out, as a fence does."""
        flushed, self.open_request = self.open_request, None
        return flushed


def is_same_packet(one: int, other: int) -> bool:
    """Whether two addresses lie in one packet."""
    return one // PACKET_BYTES == other // PACKET_BYTES


def write_requests(addresses: Iterable[int], value_bytes: int) -> list[Request]:
    """The requests of a stream of stores, the last one by a fence."""
    combiner = WriteCombiner()
    displaced = [combiner.write(address, value_bytes) for address in addresses]
    return [request for request in (*displaced, combiner.flush()) if request is not None]


def read_requests(addresses: Iterable[int]) -> list[Request]:
    """The requests of a stream of loads: whole packets."""
    requests: list[Request] = []
    for address in addresses:
        if not requests or not is_same_packet(address, requests[-1].address):
            requests.append(Request(address // PACKET_BYTES * PACKET_BYTES, PACKET_BYTES))
    return requests

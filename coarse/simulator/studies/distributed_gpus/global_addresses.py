"""A global address space of GPUs: Extoll's shared memory function unit (section 6.3).

A window of addresses is divided into intervals, one for each node. A load or store to an interval becomes an offset
at the egress unit, and an address of the target's shared memory at its ingress unit. No table holds more than the
intervals, so the target need not translate anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RemoteAddress(NamedTuple):
    """The address that the egress unit sends."""

    node: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalAddressSpace:
    """Equal intervals of one window.

    Args:
        window_start: First address of the window on every node.
        window_bytes: Its size; 256 MB with the document's GPUs.
        target_starts: Address of each node's shared memory, by node.

    Raises:
        ValueError: If the window cannot be divided evenly.
    """

    window_start: int
    window_bytes: int
    target_starts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.target_starts or self.window_bytes % len(self.target_starts):
            raise ValueError(f"{len(self.target_starts)} nodes cannot share {self.window_bytes} bytes evenly")

    @property
    def interval_bytes(self) -> int:
        """Shared memory of each node."""
        return self.window_bytes // len(self.target_starts)

    def address_of(self, node: int, offset: int) -> int:
        """Where the shared memory of a node appears in the window."""
        return self.window_start + node * self.interval_bytes + offset

    def egress(self, address: int) -> RemoteAddress:
        """Which node's memory an address of the window is, and where in it.

        Raises:
            ValueError: If the address is outside of the window.
        """
        distance = address - self.window_start
        if not 0 <= distance < self.window_bytes:
            raise ValueError(f"address {address:#x} is outside of the window at {self.window_start:#x}")
        return RemoteAddress(*divmod(distance, self.interval_bytes))

    def ingress(self, remote: RemoteAddress) -> int:
        """The address of the target's own memory."""
        return self.target_starts[remote.node] + remote.offset

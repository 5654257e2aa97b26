"""Detects translation of addresses (NAT) between two nodes: both ends of a connection then see other addresses."""

from __future__ import annotations

import ipaddress
import socket

_ADDRESS_BYTES = 16
ENDS_BYTES = 2 * _ADDRESS_BYTES
"""Length of ends_of()."""


def ends_of(link: socket.socket) -> bytes:
    """The addresses of a connection as this end sees them, its own first: IPv6 ones, or IPv4 ones mapped to them."""
    return _packed(link.getsockname()[0]) + _packed(link.getpeername()[0])


def translation(link: socket.socket, told: bytes) -> str:
    """How addresses are translated between a caller and this process, in words; "" if they are not.

    Args:
        link: The accepted connection.
        told: ends_of() of the caller's end.
    """
    seen = ends_of(link)
    caller, callee = told[:_ADDRESS_BYTES], told[_ADDRESS_BYTES:]
    if caller != seen[_ADDRESS_BYTES:]:
        return f"its address is {_name(caller)}, but its connection comes from {_name(seen[_ADDRESS_BYTES:])}"
    if callee != seen[:_ADDRESS_BYTES]:
        return f"it connected to {_name(callee)}, but the connection came to {_name(seen[:_ADDRESS_BYTES])}"
    return ""


def _packed(host: str) -> bytes:
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return ipaddress.IPv6Address(f"::ffff:{address}").packed
    return address.packed


def _name(packed: bytes) -> str:
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)

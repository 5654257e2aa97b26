"""Where worker 0 listens for the other workers of its job: at the address that they are given, and no other."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_LOOPBACK = "127.0.0.1"


def rendezvous_host(host: str) -> str:
    """MASTER_ADDR as worker 0 and all others use it: of localhost's two addresses the one of IPv4.

    Worker 0 listens on one of them, and somebody else could listen on the other.
    """
    if host != "localhost":
        return host
    with contextlib.suppress(OSError):
        if _LOOPBACK in _addresses(host, 0):
            return _LOOPBACK
    return host


def host_and_port(host: str, port: int) -> str:
    """An address as it is written: 10.0.0.1:29500, [fd00::1]:29500."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_for_workers(host: str, port: int) -> socket.socket:
    """Listens at MASTER_ADDR, which other workers connect to.

    That is the loopback interface alone for a loopback address. All interfaces it is only where `host` says too
    little: it is no address of this machine's interfaces (of a service in front of it, say), or a name that only
    this machine takes for its loopback address.

    Args:
        host: As all workers are given it.
        port: 0 for a free one.

    Raises:
        OSError: If the port is taken.
    """
    host = rendezvous_host(host)
    addresses: dict[str, socket.AddressFamily] = {}
    with contextlib.suppress(OSError):  # a name that other machines know
        addresses = _addresses(host, port)
    if _is_loopback(host) or not any(map(_is_loopback, addresses)):
        for address, family in addresses.items():
            try:
                return _listen(family, address, port)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    logger.info("%s is not an address of this machine: listening on all interfaces", host)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return _listen(socket.AF_INET6, "::", port)
    return _listen(socket.AF_INET, "", port)


def _addresses(host: str, port: int) -> dict[str, socket.AddressFamily]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {str(address[0]): family for family, _, _, _, address in found}


def _is_loopback(host: str) -> bool:
    """Whether it is a loopback address on every machine."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # The launcher holds the port by a socket that has set it too, and never listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener

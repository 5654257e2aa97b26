"""The address and the network interface by which other nodes reach this one."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping

from coarse.env import master_address
from coarse.errors import RendezvousError
from coarse.settings import Settings

_LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
_REQUEST = struct.Struct("16s H 2x 4s 16x")  # struct ifreq: name, family, IPv4 address


def address_of_this_node(settings: Settings, *, master: str | None = None) -> str:
    """The address on which this node listens for other nodes: never the wildcard address.

    Args:
        settings: The session's settings.
        master: MASTER_ADDR, if not that of this process.

    Raises:
        RendezvousError: If MASTER_ADDR cannot be resolved.
    """
    master = settings.node_address or (master_address() if master is None else master) or _LOOPBACK
    try:
        family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            if settings.node_address:
                return str(target[0])
            probe.connect(target)  # sends nothing; chooses the interface
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(
            f"no interface of this node leads to {master!r} ({error}); set COARSE_NODE_ADDRESS to an address of "
            "this node that the others can reach"
        ) from None
    # Debian's /etc/hosts maps a machine's own name to 127.0.1.1, which other nodes cannot use.
    if is_loopback(found) and not is_loopback(master) and master != "localhost":
        return _address_of_default_route() or found
    return found


def is_loopback(host: str) -> bool:
    """Whether this address, which is no name, reaches this machine alone."""
    return host.startswith("127.") or host == "::1"


def _address_of_default_route() -> str:
    """Address of the interface that leads to other networks; "" if none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737); sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def try_address_of_this_node(settings: Settings) -> str:
    """Like address_of_this_node(); "" if it fails."""
    try:
        return address_of_this_node(settings)
    except RendezvousError:
        return ""


def gloo_variables(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which torch's gloo listens at an address that other nodes can reach.

    gloo takes the address of the machine's own name. Debian maps it to 127.0.1.1, and some containers do not know it.

    Args:
        settings: The session's settings.
        environ: With MASTER_ADDR, and perhaps with the user's own choice.

    Returns:
        GLOO_SOCKET_IFNAME, or nothing if it is set, gloo needs no help, or no interface of IPv4 is found.
    """
    if "GLOO_SOCKET_IFNAME" in environ or not _gloo_takes_loopback():
        return {}
    try:
        address = address_of_this_node(settings, master=environ.get("MASTER_ADDR", ""))
    except RendezvousError:
        return {}  # link_nodes() reports it
    name = "" if is_loopback(address) else _interface_of(address)
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def _gloo_takes_loopback() -> bool:
    """Whether this machine's name leads to loopback, or to no address of its interfaces."""
    try:
        address = socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return True
    return is_loopback(address)


def _interface_of(address: str) -> str:
    """The interface that has this address of IPv4; "" if none does."""
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), "")


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = _REQUEST.pack(interface.encode(), socket.AF_INET, bytes(4))
            return socket.inet_ntoa(_REQUEST.unpack(fcntl.ioctl(any_socket, _GET_ADDRESS, request))[2])
        except OSError:  # it has none
            return ""

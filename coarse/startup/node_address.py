"""The address and the network interface by which other nodes reach this one."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from coarse.env import master_address
from coarse.errors import RendezvousError
from coarse.settings import Settings

_LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
_REQUEST = struct.Struct("16s H 2x 4s 16x")  # struct ifreq: name, family, IPv4 address
_IPV6_ADDRESSES = Path("/proc/self/net/if_inet6")
_LINK_LOCAL = 0x20  # scope, as in net/ipv6.h
_TEMPORARY_OR_UNUSABLE = 0x01 | 0x08 | 0x40  # IFA_F_TEMPORARY, IFA_F_DADFAILED, IFA_F_TENTATIVE
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # addresses for documentation (RFC 5737, RFC 3849)


def address_of_this_node(settings: Settings, *, master: str | None = None) -> str:
    """The address on which this node listens for other nodes: never the wildcard address.

    Args:
        settings: The session's settings.
        master: MASTER_ADDR, if not that of this process.

    Raises:
        RendezvousError: If MASTER_ADDR cannot be resolved, or COARSE_NODE_ADDRESS names nothing.
    """
    master = (master_address() if master is None else master) or _LOOPBACK
    if settings.node_address:
        return _chosen_address(settings.node_address, master)
    found = _address_towards(master)
    # Debian's /etc/hosts maps a machine's own name to 127.0.1.1, which other nodes cannot use.
    if is_loopback(found) and not is_loopback(master) and master != "localhost":
        return _address_of_default_route() or _only_address() or found
    return found


def is_loopback(host: str) -> bool:
    """Whether this address, which is no name, reaches this machine alone."""
    return host.startswith("127.") or host == "::1"


def describe_interfaces() -> str:
    """The network interfaces of this machine with their addresses, for messages."""
    found = (f"{name} ({', '.join(addresses)})" for name, addresses in _interfaces().items())
    return ", ".join(found) or "none has an address"


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
        GLOO_SOCKET_IFNAME, or nothing if it is set, gloo needs no help, or no interface is found.
    """
    if "GLOO_SOCKET_IFNAME" in environ or not (settings.node_address or _gloo_takes_loopback()):
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


# ---- the choice ----


def _chosen_address(chosen: str, master: str) -> str:
    """The address that COARSE_NODE_ADDRESS gives: itself, that of a name, or that of an interface."""
    interfaces = _interfaces()
    if chosen in interfaces:
        return _of_family_of(master, interfaces[chosen])
    try:
        return str(socket.getaddrinfo(chosen, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise RendezvousError(
            f"COARSE_NODE_ADDRESS={chosen!r} is neither an address ({error}) nor an interface of this node that has "
            f"one; its interfaces: {describe_interfaces()}"
        ) from None


def _of_family_of(master: str, addresses: list[str]) -> str:
    """The first of an interface's addresses that is of the same family, IPv4 or IPv6, as MASTER_ADDR."""
    families: set[bool] = set()
    with contextlib.suppress(OSError):  # the store reports it
        families = {":" in str(found[4][0]) for found in socket.getaddrinfo(master, None)}
    return next((address for address in addresses if (":" in address) in families), addresses[0])


def _address_towards(master: str) -> str:
    """The address of the interface that leads to MASTER_ADDR."""
    problem: OSError | None = None
    try:
        for family, _, _, _, target in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
            try:
                return _source_towards(family, target)
            except OSError as error:
                problem = error
    except OSError as error:
        problem = error
    raise RendezvousError(
        f"no interface of this node leads to {master!r} ({problem}); set COARSE_NODE_ADDRESS to an interface or "
        f"address of this node that the others can reach. Its interfaces: {describe_interfaces()}"
    )


def _source_towards(family: int, target: object) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # type: ignore[arg-type]  # sends nothing; chooses the interface
        return str(probe.getsockname()[0])


def _address_of_default_route() -> str:
    """Address of the interface that leads to other networks; "" if none does."""
    for host in _ELSEWHERE:
        with contextlib.suppress(OSError):
            return _source_towards(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 9))
    return ""


def _only_address() -> str:
    """Address of the only interface other than loopback; "" if there are several or none."""
    others = [addresses for addresses in _interfaces().values() if not is_loopback(addresses[0])]
    return others[0][0] if len(others) == 1 else ""


# ---- interfaces ----


def _interfaces() -> dict[str, list[str]]:
    """The interfaces that have addresses, with these: IPv4 first, without those that reach only one cable."""
    names = [name for _, name in socket.if_nameindex()]
    ipv6 = _ipv6_addresses()
    found = {name: [*filter(None, [_ipv4_address(name)]), *ipv6.get(name, [])] for name in names}
    return {name: addresses for name, addresses in found.items() if addresses}


def _interface_of(address: str) -> str:
    """The interface that has this address; "" if none does."""
    return next((name for name, addresses in _interfaces().items() if address in addresses), "")


def _ipv4_address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = _REQUEST.pack(interface.encode(), socket.AF_INET, bytes(4))
            return socket.inet_ntoa(_REQUEST.unpack(fcntl.ioctl(any_socket, _GET_ADDRESS, request))[2])
        except OSError:  # it has none
            return ""


def _ipv6_addresses() -> dict[str, list[str]]:
    """The lasting addresses of each interface that other networks can reach."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            address, _, _, scope, flags, name = line.split()
            if int(scope, 16) != _LINK_LOCAL and not int(flags, 16) & _TEMPORARY_OR_UNUSABLE:
                found.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(address))))
    return found

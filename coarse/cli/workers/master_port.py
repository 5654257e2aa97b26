"""MASTER_PORT, reserved by the launcher so that no other process takes it before worker 0 serves the store there."""

from __future__ import annotations

import contextlib
import socket


class MasterPort:
    """A TCP port of this machine that is reserved for this job from start to end, across restarts.

    It is bound with SO_REUSEADDR and never listens. The kernel then does not assign it to processes that request any
    free port. It also refuses requests for this port without SO_REUSEADDR. The servers of torch, gRPC and
    coarse.rendezvous.socket_store set SO_REUSEADDR, so worker 0 needs no descriptor from the launcher.

    Args:
        port: The user's choice, reserved if it is free; None to choose a free one.
        is_here: Whether worker 0 runs on this machine; otherwise no port is reserved.

    Raises:
        OSError: If there is no free port.
    """

    def __init__(self, port: int | None, *, is_here: bool = True) -> None:
        self._chosen = port
        self._socket: socket.socket | None = None
        if port is None:
            self._socket = _hold(0)
        elif is_here:
            with contextlib.suppress(OSError):  # worker 0 reports the error if it needs the port
                self._socket = _hold(port)

    @property
    def number(self) -> int:
        """Number of the port."""
        if self._chosen is not None:
            return self._chosen
        assert self._socket is not None
        return int(self._socket.getsockname()[1])

    def renew(self) -> None:
        """Changes to another port unless the user chose it, because connections of an earlier attempt may linger."""
        if self._chosen is None:
            before, self._socket = self._socket, _hold(0)
            if before is not None:
                before.close()

    def close(self) -> None:
        """Releases the port. Idempotent."""
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> MasterPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hold(port: int) -> socket.socket:
    """Returns a socket bound to a port on all addresses, including IPv6 addresses if available."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return _bind(socket.AF_INET6, port)
    return _bind(socket.AF_INET, port)


def _bind(family: socket.AddressFamily, port: int) -> socket.socket:
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("", port))
    except OSError:
        holder.close()
        raise
    return holder

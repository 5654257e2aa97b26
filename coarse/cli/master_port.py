"""MASTER_PORT, held by the launcher so that nobody takes it before worker 0 serves the workers' store there."""

from __future__ import annotations

import contextlib
import socket


class MasterPort:
    """A TCP port of this machine that stays this job's, from the choice to the end, across restarts.

    It is bound with SO_REUSEADDR and never listens. The kernel then gives it to no process that asks for any port,
    and refuses it to one that asks for this one, unless that sets SO_REUSEADDR too, as the servers of torch, gRPC and
    coarse.socket_store do: worker 0 needs no descriptor of the launcher's.

    Args:
        port: The user's choice, held if it is free; None to choose a free one.
        is_here: Whether worker 0 runs on this machine; else nothing is held.

    Raises:
        OSError: If there is no free port.
    """

    def __init__(self, port: int | None, *, is_here: bool = True) -> None:
        self._chosen = port
        self._socket: socket.socket | None = None
        if port is None:
            self._socket = _hold(0)
        elif is_here:
            with contextlib.suppress(OSError):  # which worker 0 tells, if it needs the port at all
                self._socket = _hold(port)

    @property
    def number(self) -> int:
        """The port."""
        if self._chosen is not None:
            return self._chosen
        assert self._socket is not None
        return int(self._socket.getsockname()[1])

    def renew(self) -> None:
        """Changes to another port, unless it is the user's choice: connections of an earlier attempt may linger."""
        if self._chosen is None:
            before, self._socket = self._socket, _hold(0)
            if before is not None:
                before.close()

    def close(self) -> None:
        """Gives the port back. Idempotent."""
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> MasterPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hold(port: int) -> socket.socket:
    """A socket that is bound to a port of all addresses, also those of IPv6 where there are any."""
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

"""The ports at which a node listens for other nodes: any free ones, or those that a firewall lets through."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from coarse.errors import RendezvousError

_HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class NodePorts:
    """A range of TCP ports, which COARSE_NODE_PORTS sets.

    Args:
        first, last: Its lowest and its highest port; both 0 for any free port.
    """

    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> NodePorts:
        """Reads "20000-20099"; "" stands for any free port.

        Raises:
            ValueError: If `text` is anything else.
        """
        found = re.fullmatch(r"(\d+)-(\d+)", text)
        ports = cls(*map(int, found.groups())) if found else cls()
        if text and not 0 < ports.first <= ports.last <= _HIGHEST_PORT:
            raise ValueError(f"{text!r} is not a range of ports; write one such as 20000-20099")
        return ports

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    @property
    def is_limited(self) -> bool:
        """Whether it is a range."""
        return self.first > 0

    def check(self, num_workers: int) -> None:
        """Raises RendezvousError if the range is too small for a node with this number of workers."""
        needed = 2 * num_workers + 2
        if self.is_limited and len(self) < needed:
            raise RendezvousError(
                f"COARSE_NODE_PORTS={self} has {len(self)} port(s), but a node of {num_workers} worker(s) needs "
                f"{needed}: one for each worker and one for each memory device, one for the connections of other "
                f"nodes, and one for a process group. Set a range of at least {needed} ports, and as many more for "
                "each other job on the machine."
            )

    def listen(self, host: str, *, backlog: int) -> socket.socket:
        """Listens at a free port of the range.

        Raises:
            OSError: If this machine cannot listen at `host`.
            RendezvousError: If all ports of the range are taken.
        """
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return self.first_free(
            lambda port: socket.create_server((host, port), family=family, backlog=backlog)
        )

    def reserve(self, host: str) -> socket.socket:
        """A socket that keeps a free port of the range from others, and does not listen; the highest ports go first.

        Raises:
            OSError: If this machine cannot listen at `host`.
            RendezvousError: If all ports of the range are taken.
        """
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return self._take(range(self.last, self.first - 1, -1), lambda port: _bound(family, host, port))

    def first_free(self, listen: Callable[[int], socket.socket]) -> socket.socket:
        """The first result of `listen` for the ports of the range in turn, or for port 0.

        Raises:
            OSError: That of `listen`, unless it is that a port is taken.
            RendezvousError: If all ports of the range are taken.
        """
        return self._take(range(self.first, self.last + 1), listen)

    def _take(self, ports: Iterable[int], listen: Callable[[int], socket.socket]) -> socket.socket:
        for port in ports:
            try:
                return listen(port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not self.is_limited:
                    raise
        raise RendezvousError(
            f"all {len(self)} ports of COARSE_NODE_PORTS={self} are taken on this machine. A node needs one for each "
            "of its workers and memory devices and two more, and so does the node of each other job here. Set a "
            "wider range."
        )


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    """A socket with a port that no other socket has; another socket may listen there later."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return bound

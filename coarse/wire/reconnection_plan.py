"""How a process replaces its connections to other nodes when they break."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConnection:
    """A connection to another node, as it can be made again.

    Args:
        node: The other node.
        number: Its place among this process's connections to that node.
        connection: Its number among all connections of the two nodes.
        host, port: Where the process at its other end listens while the connection is broken.
    """

    node: int
    number: int
    connection: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconnectionPlan:
    """The connections of one process to other nodes.

    Args:
        node: This process's node. It calls nodes of a lower number, and is called by the others.
        secret: The secret of the node links, hexadecimal.
        held_fd: A socket that is bound to an address where this process may listen, and keeps others from its port.
        connections: All of them.
    """

    node: int
    secret: str
    held_fd: int
    connections: tuple[NodeConnection, ...]

    def __repr__(self) -> str:
        return f"ReconnectionPlan(node={self.node}, connections={self.connections})"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ReconnectionPlan:
        """Reads what dataclasses.asdict() has made."""
        connections = tuple(NodeConnection(**each) for each in values["connections"])
        return cls(**{**values, "connections": connections})

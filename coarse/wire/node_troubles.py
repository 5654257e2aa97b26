"""What a process does about connections to other nodes that are silent or broken: it says so, and replaces them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class Reconnecting(Protocol):
    """Replaces connections to other nodes, by node and place among those to it."""

    def begin(self, node: int, number: int) -> None:
        """A connection is silent or broken."""

    def end(self, node: int, number: int) -> None:
        """A connection is in order again, or lost."""

    def close(self) -> None:
        """Ends all attempts. Idempotent."""


class NodeTroubles:
    """Connections in trouble. Used from one thread.

    Args:
        name: Names a node in messages.
        patience_s: Seconds after which a node in trouble is lost.
        reconnect: Makes what replaces connections, when the first one needs it.
        may_lose_nodes: Whether the other nodes go on without a lost one.
    """

    def __init__(
        self,
        name: Callable[[int], str],
        patience_s: float,
        reconnect: Callable[[], Reconnecting],
        *,
        may_lose_nodes: bool = False,
    ) -> None:
        self._name = name
        self._patience_s = patience_s
        self._reconnect = reconnect
        self._outcome = "goes on without it" if may_lose_nodes else "ends"
        self._reconnection: Reconnecting | None = None
        self._troubled: dict[int, set[int]] = {}  # by node

    def begin(self, node: int, number: int, what: str) -> None:
        """A connection is silent or broken, as `what` tells; says so for the first one of a node."""
        troubled = self._troubled.setdefault(node, set())
        if not troubled:
            logger.warning(
                "%s: %s. The job stands still until it answers, and %s after %g s (COARSE_NODE_TIMEOUT_S)",
                *(self._name(node), what, self._outcome, self._patience_s),
            )
        troubled.add(number)
        if self._reconnection is None:
            self._reconnection = self._reconnect()
        self._reconnection.begin(node, number)

    def end(self, node: int, number: int) -> None:
        """A connection is in order again; says so for the last one of a node."""
        if self._troubled.get(node) == {number}:
            logger.warning("%s answers again; the job goes on", self._name(node))
        self.forget(node, number)

    def forget(self, node: int, number: int) -> None:
        """A connection is lost."""
        self._troubled.get(node, set()).discard(number)
        if self._reconnection is not None:
            self._reconnection.end(node, number)

    def close(self) -> None:
        """Replaces no connection any more. Idempotent."""
        if self._reconnection is not None:
            self._reconnection.close()

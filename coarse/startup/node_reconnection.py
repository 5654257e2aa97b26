"""Replaces connections between nodes that broke; docs/design/nodes.md describes it."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from coarse.startup.node_links import Doorkeeper, call_again, check_is_served, close_abruptly
from coarse.wire.reconnection_plan import NodeConnection, ReconnectionPlan

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.25
_RETRY_INTERVAL_S = 0.1
_ANSWER_S = 5.0
_NOTICE_S = 2.5
"""Time in which a process that lives notices that the connection is broken, and listens."""


class Links(Protocol):
    """Connections to other nodes, by node and place among those to it. Usable from any thread."""

    def resume_link(self, node: int, number: int, fd: int) -> None:
        """Continues over another connection; takes ownership of the descriptor."""

    def interrupt_link(self, node: int, number: int) -> None:
        """Breaks a connection, so that the other end notices."""

    def give_up_link(self, node: int, number: int, reason: str) -> None:
        """Loses the other node."""


class Reconnection:
    """Makes connections anew while some are in trouble; it listens and has threads only then.

    Both ends of a connection do this: one calls, and the other one checks whether the caller still exists. A machine
    that refuses connections for a while has lost that process. One that does not answer may come back: how long to
    wait for it is decided elsewhere.

    Args:
        plan: The connections of this process.
        links: Their native side.
    """

    def __init__(self, plan: ReconnectionPlan, links: Links) -> None:
        self._plan = plan
        self._links = links
        self._lock = threading.Lock()  # guards the members below
        self._troubles: dict[NodeConnection, threading.Event] = {}  # each is set when its trouble is over
        self._door: Doorkeeper | None = None
        self._is_closed = False

    def begin(self, node: int, number: int) -> None:
        """A connection is silent or broken. Does nothing if that is known."""
        connection = self._find(node, number)
        with self._lock:
            if self._is_closed or connection in self._troubles:
                return
            is_over = self._troubles[connection] = threading.Event()
            self._open_door()
        _start(lambda: self._repair(connection, is_over))

    def end(self, node: int, number: int) -> None:
        """A connection is in order again, or lost. Does nothing if it was not in trouble."""
        connection = self._find(node, number)
        with self._lock:
            if (is_over := self._troubles.pop(connection, None)) is not None:
                is_over.set()
            door = self._door if not self._troubles else None
            self._door = None if door is not None else self._door
        if door is not None:
            door.close()

    def close(self) -> None:
        """Ends all attempts. Idempotent."""
        with self._lock:
            self._is_closed = True
            troubled = list(self._troubles)
        for connection in troubled:
            self.end(connection.node, connection.number)

    def _find(self, node: int, number: int) -> NodeConnection:
        return next(each for each in self._plan.connections if (each.node, each.number) == (node, number))

    def _open_door(self) -> None:
        """Listens, with the lock held. Without a listener the other nodes may still be called."""
        if self._door is not None:
            return
        try:
            door = Doorkeeper(self._plan)
        except OSError as error:
            logger.warning("cannot listen for other nodes whose connections broke: %s", error)
            return
        self._door = door
        _start(lambda: self._welcome(door))

    def _welcome(self, door: Doorkeeper) -> None:
        while not door.is_closed:
            with contextlib.suppress(queue.Empty):
                node, connection, link = door.visitors.get(timeout=_LOOK_INTERVAL_S)
                self._admit(node, connection, link)

    def _admit(self, node: int, connection: int, link: socket.socket) -> None:
        for each in self._plan.connections:
            if (each.node, each.connection) == (node, connection) and node > self._plan.node:
                return self._links.resume_link(node, each.number, link.detach())
        logger.warning("refused connection %s of node %s: there is none to replace", connection, node)
        close_abruptly(link)

    def _repair(self, connection: NodeConnection, is_over: threading.Event) -> None:
        refused_s: float | None = None
        pause_s = 0.0
        while not is_over.wait(pause_s):
            pause_s = _RETRY_INTERVAL_S
            try:
                pause_s = self._try(connection)
                refused_s = None
            except ConnectionRefusedError:
                if refused_s is None:
                    # Its machine answers, but the process may not have noticed yet.
                    refused_s = time.monotonic()
                    self._links.interrupt_link(connection.node, connection.number)
                elif time.monotonic() - refused_s > _NOTICE_S:
                    return self._give_up(connection)
            except OSError as error:
                logger.debug("node %s does not answer: %s", connection.node, error)
                refused_s = None

    def _try(self, connection: NodeConnection) -> float:
        """Calls the other end, or checks whether it is there; returns how long that suffices, in seconds."""
        if connection.node > self._plan.node:
            check_is_served(connection)
            return _LOOK_INTERVAL_S
        link = call_again(connection, self._plan)
        if self._is_closed:
            close_abruptly(link)
        else:
            self._links.resume_link(connection.node, connection.number, link.detach())
        return _ANSWER_S

    def _give_up(self, connection: NodeConnection) -> None:
        where = f"{connection.host} port {connection.port}"
        self._links.give_up_link(
            connection.node, connection.number, f"its process has ended: nobody listens at {where} any more"
        )


def _start(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="coarse-node-repair", daemon=True).start()

"""Watches a group's connections to other nodes: says when they are silent or broken, and replaces them."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from coarse.startup.node_reconnection import Reconnection
from coarse.wire.node_troubles import NodeTroubles
from coarse.wire.reconnection_plan import ReconnectionPlan

if TYPE_CHECKING:
    from coarse.kernels import _native


def watch_links(
    links: _native.GroupLinks, plan: ReconnectionPlan, *, name: Callable[[int], str], patience_s: float
) -> None:
    """Starts a thread that ends with the group, and sleeps as long as all connections are in order.

    Args:
        links: The group's connections.
        plan: How to replace them; the caller closes its descriptor.
        name: Names a node in messages.
        patience_s: Seconds after which a node in trouble is lost.
    """
    own = replace(plan, held_fd=os.dup(plan.held_fd))
    troubles = NodeTroubles(name, patience_s, lambda: Reconnection(own, links))
    threading.Thread(
        target=_serve, args=(links, troubles, own.held_fd), name="coarse-links", daemon=True
    ).start()


def _serve(links: _native.GroupLinks, troubles: NodeTroubles, held_fd: int) -> None:
    from coarse.kernels import _native

    kinds = _native.NodeEventKind
    try:
        while True:
            select.select([links.event_fd], [], [])
            events = links.take_events()
            if events is None:
                return
            for kind, node, number, reason in events:
                if kind in (kinds.SILENT, kinds.INTERRUPTED):
                    troubles.begin(node, number, reason.decode(errors="replace"))
                elif kind == kinds.ANSWERING:
                    troubles.end(node, number)
                else:
                    troubles.forget(node, number)
    finally:
        troubles.close()
        with contextlib.suppress(OSError):
            os.close(held_fd)

"""Lost nodes, without which the others go on (docs/design/membership.md): one memory device's part in it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coarse.errors import ProtocolError
from coarse.kernels import _native
from coarse.proxy.outbox import SendToPeers
from coarse.wire.device_job import HOME_DEVICE, DeviceJob
from coarse.wire.failure_messages import (
    Failure,
    few_nodes_left,
    name_of_node,
    node_excluded,
    node_lost,
    nodes_lost_together,
)
from coarse.wire.messages import Message, int_field

logger = logging.getLogger(__name__)

NOTICED, LOSE, SUSPENDED, RESUME = "node_lost", "lose_node", "node_suspended", "resume_without_node"
"""Messages between the devices of a node: to the home device, from it, to it, and from it."""

MESSAGES = frozenset({NOTICED, LOSE, SUSPENDED, RESUME})

_REPORTED, _SETTLED, _ENDS = "reported", "settled", "ends"  # between the home devices of nodes; _ENDS to all


_MOST_QUOTED = 200


@dataclass(slots=True, kw_only=True)
class _Takeover:
    """The loss of a node, until the others go on.

    Args:
        node: The lost node.
        reason: How it was lost.
        is_certain: Whether its processes have ended; otherwise it may only be out of reach.
        suspended: Devices of this node that take no more frames of the lost one.
        reported, settled: Nodes that have reported, and that have settled.
    """

    node: int
    reason: str
    is_certain: bool
    began_s: float = field(default_factory=time.monotonic)
    suspended: set[int] = field(default_factory=set)
    reported: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)
    is_settling: bool = False


class LostNodes:
    """Goes on without lost nodes, one after the other. Used from the control thread alone.

    The home device leads its node: all devices suspend, then all nodes report to the new owners of the lost node's
    shards, then these settle, then all resume. A second loss in between ends the session.

    Args:
        job: The device's place in the session.
        tell_peers: Sends a message to the other devices of this node.
        tell_peer: Sends a message to one of them.
        abort: Ends the session.
        can_go_on: Whether the session runs, and goes on without lost workers.
        lose_workers: Notes the loss of all workers of a node; returns why the others cannot go on.
        proxy: The native proxy, once it runs.
    """

    def __init__(
        self,
        job: DeviceJob,
        tell_peers: SendToPeers,
        tell_peer: Callable[[int, Message], None],
        abort: Callable[[Failure], None],
        can_go_on: Callable[[], bool],
        lose_workers: Callable[[int, str], Failure | None],
        proxy: Callable[[], _native.Proxy],
    ) -> None:
        self._job = job
        self._tell_peers = tell_peers
        self._tell_peer = tell_peer
        self._abort = abort
        self._can_go_on = can_go_on
        self._lose_workers = lose_workers
        self._proxy = proxy
        self._takeover: _Takeover | None = None
        self._lost: list[int] = []
        self._noticed: set[int] = set()  # of which the home device was told, which may not have answered yet

    @property
    def nodes(self) -> frozenset[int]:
        """Nodes that are lost."""
        current = [] if self._takeover is None else [self._takeover.node]
        return frozenset([*self._lost, *current])

    def has_noticed(self, node: int) -> bool:
        """Whether this device knows that a node is lost: what it says afterwards does not count."""
        return node in self.nodes or node in self._noticed

    def notice(self, node: int, reason: str, *, is_certain: bool) -> None:
        """A device has lost its connection to another node, or the node has said that it ends."""
        if self.has_noticed(node):
            return
        if not self._job.may_lose_nodes or not self._can_go_on():
            return self._abort(node_lost(self._job, node, reason))
        if self._job.is_home:
            return self._begin(node, reason, is_certain=is_certain)
        self._noticed.add(node)
        self._tell_peer(
            HOME_DEVICE, {"type": NOTICED, "node": node, "reason": reason, "is_certain": is_certain}
        )

    def announce_end(self, failure: Failure) -> None:
        """Tells all other nodes that this one ends, without which they may go on."""
        self._proxy().tell_all_nodes(json.dumps({"type": _ENDS, "reason": failure.to_reason()}))

    def hear_peer(self, device: int, message: Message) -> None:
        """Takes one of MESSAGES of another device of this node."""
        node, kind = int_field(message, "node", high=self._job.num_nodes - 1), message["type"]
        if not self._can_go_on():
            return
        if kind == NOTICED:
            self.notice(node, str(message["reason"]), is_certain=message["is_certain"] is True)
        elif kind == LOSE:
            self._suspend(node, str(message["reason"]), is_certain=message["is_certain"] is True)
        elif kind == SUSPENDED:
            self._note_suspended(node, device)
        else:
            self._resume(node)

    def hear_node(self, sender: int, text: str) -> None:
        """Takes a message of another node's control thread."""
        if self.has_noticed(sender) or not self._can_go_on():
            return
        try:
            told = _read(text, self._job)
        except ProtocolError as error:
            return self._abort(node_lost(self._job, sender, f"it sent {text[:_MOST_QUOTED]!r}: {error}"))
        kind, reason = told["type"], str(told.get("reason"))
        if kind == _ENDS:
            return self.notice(sender, reason, is_certain=True)
        node = told["node"]
        if node == self._job.node:
            return  # the others go on without this one; an abort says so
        if kind == _REPORTED:
            self._begin(node, reason, is_certain=told.get("is_certain") is True)
        takeover = self._takeover
        if takeover is None or takeover.node != node:
            return
        (takeover.reported if kind == _REPORTED else takeover.settled).add(sender)
        self._advance()

    def note_settled(self) -> None:
        """This node has settled: the native proxy says so."""
        takeover = self._takeover
        if takeover is None or not self._can_go_on():
            return
        self._tell_nodes({"type": _SETTLED, "node": takeover.node})
        takeover.settled.add(self._job.node)
        self._advance()

    # ---- the home device ----

    def _live(self) -> list[int]:
        return [node for node in range(self._job.num_nodes) if node not in self.nodes]

    def _begin(self, node: int, reason: str, *, is_certain: bool) -> None:
        if node in self.nodes:
            return
        if self._takeover is not None:
            return self._abort(nodes_lost_together(self._job, self._takeover.node, node, reason))
        num_before = len(self._live())
        if not is_certain and 2 * (num_before - 1) <= num_before:
            return self._abort(few_nodes_left(self._job, node, reason, num_before - 1, num_before))
        self._tell_peers({"type": LOSE, "node": node, "reason": reason, "is_certain": is_certain}, ())
        self._suspend(node, reason, is_certain=is_certain)

    def _note_suspended(self, node: int, device: int) -> None:
        takeover = self._takeover
        if takeover is None or takeover.node != node:
            return
        takeover.suspended.add(device)
        if len(takeover.suspended) < self._job.num_devices:
            return
        self._proxy().report_without(node)
        self._tell_nodes(
            {
                "type": _REPORTED,
                "node": node,
                "reason": takeover.reason,
                "is_certain": takeover.is_certain,
            }
        )
        takeover.reported.add(self._job.node)
        self._advance()

    def _advance(self) -> None:
        """Takes the steps for which all nodes are ready."""
        takeover, live = self._takeover, {*self._live()}
        if takeover is None:
            return
        if takeover.reported >= live and not takeover.is_settling:
            takeover.is_settling = True
            self._proxy().settle_without(takeover.node)
        if takeover.settled >= live:
            self._resume(takeover.node)
            self._tell_peers({"type": RESUME, "node": takeover.node}, ())
            took_s = time.monotonic() - takeover.began_s
            logger.warning(
                "[md%s] this node goes on without %s, after %.0f ms; what that node reduced has other owners",
                *(self._job.device, name_of_node(self._job, takeover.node), took_s * 1000),
            )

    def _tell_nodes(self, message: Message) -> None:
        for node in self._live():
            if node != self._job.node:
                self._proxy().tell_node(node, json.dumps(message))

    # ---- each device ----

    def _suspend(self, node: int, reason: str, *, is_certain: bool) -> None:
        self._takeover = _Takeover(node=node, reason=reason, is_certain=is_certain)
        if failure := self._lose_workers(node, reason):
            return self._abort(failure)
        self._proxy().suspend_node(node, node_excluded(self._job, node, reason).to_node())
        if self._job.is_home:
            self._note_suspended(node, self._job.device)
        else:
            self._tell_peer(HOME_DEVICE, {"type": SUSPENDED, "node": node})

    def _resume(self, node: int) -> None:
        self._lost.append(node)
        self._takeover = None
        self._proxy().resume_without(node)


def _read(text: str, job: DeviceJob) -> Message:
    """A message between the home devices of nodes, whose type and node are checked."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError("it is no JSON") from None
    if not isinstance(told, dict) or told.get("type") not in (_ENDS, _REPORTED, _SETTLED):
        raise ProtocolError("it is no message of a loss")
    if not job.may_lose_nodes:
        raise ProtocolError("this job cannot go on without a node")
    if told["type"] != _ENDS:
        int_field(told, "node", high=job.num_nodes - 1)
    return told

"""A memory device's view of the other nodes of its job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from coarse.kernels import _native
from coarse.proxy.nodes.lost_nodes import MESSAGES, LostNodes
from coarse.proxy.outbox import SendToPeers
from coarse.wire.device_job import DeviceJob
from coarse.wire.failure_messages import Failure, WorkerLoss, name_of_node, node_lost
from coarse.wire.messages import Message
from coarse.wire.node_troubles import NodeTroubles, Reconnecting
from coarse.wire.reconnection_plan import ReconnectionPlan

Reconnect: TypeAlias = Callable[[ReconnectionPlan, _native.Proxy], Reconnecting]
"""Makes what replaces the connections of a proxy."""


class OtherNodes:
    """Handles the native proxy's reports about other nodes. Used from the control thread alone.

    Args:
        job: The device's place in the session.
        tell_peers, tell_peer: Send a message to the other devices of this node, and to one.
        abort: Ends the session.
        reconnect: Makes what replaces connections.
        lose_worker: Notes the loss of a worker of another node, without which the others go on.
        can_go_on, lose_workers, proxy: As for LostNodes.
    """

    def __init__(
        self,
        job: DeviceJob,
        tell_peers: SendToPeers,
        tell_peer: Callable[[int, Message], None],
        abort: Callable[[Failure], None],
        reconnect: Reconnect,
        lose_worker: Callable[[WorkerLoss], None],
        *,
        can_go_on: Callable[[], bool],
        lose_workers: Callable[[int, str], Failure | None],
        proxy: Callable[[], _native.Proxy],
    ) -> None:
        self._job = job
        self._tell_peers = tell_peers
        self._abort = abort
        self._reconnect = reconnect
        self._lose_worker = lose_worker
        self.lost = LostNodes(job, tell_peers, tell_peer, abort, can_go_on, lose_workers, proxy)
        """Nodes without which the others go on."""
        self.kinds_of_losses = MESSAGES
        """Kinds of messages of this node's devices for LostNodes.hear_peer()."""
        self._troubles: NodeTroubles | None = None
        self._ended_at: dict[int, set[int]] = {}  # by other node, this node's devices that have seen it end
        self.departed_ranks: set[int] = set()
        """Workers of other nodes that have left."""

    def take_events(self, proxy: _native.Proxy) -> None:
        """Handles all events since the last call."""
        for kind, node, number, reason, cause in proxy.take_node_events():
            text = reason.decode(errors="replace")
            if kind == _native.NodeEventKind.LOST:
                self._troubles_of(proxy).forget(node, number)
                if cause == _native.LossCause.INVALID_FRAME:
                    self._abort(node_lost(self._job, node, text))
                else:
                    self.lost.notice(node, text, is_certain=cause == _native.LossCause.PEER_ENDED)
            elif kind == _native.NodeEventKind.AGREEMENT:
                self.lost.hear_node(node, text)
            elif kind == _native.NodeEventKind.SETTLED:
                self.lost.note_settled()
            elif self.lost.has_noticed(node):
                pass  # what it has said before it was lost, and its goodbye
            elif kind == _native.NodeEventKind.LEFT:
                self.departed_ranks.add(number)
                proxy.worker_left_node(node)
            elif kind == _native.NodeEventKind.WORKER_LOST:
                self._lose_worker(WorkerLoss.from_node(number, text))
            elif kind == _native.NodeEventKind.ABORTED:
                self._abort(Failure.from_node(text))
            elif kind in (_native.NodeEventKind.SILENT, _native.NodeEventKind.INTERRUPTED):
                self._troubles_of(proxy).begin(node, number, text)
            elif kind == _native.NodeEventKind.ANSWERING:
                self._troubles_of(proxy).end(node, number)
            else:
                self._tell_peers({"type": "node_ended", "node": node}, ())
                self.node_ended(node, self._job.device, proxy)

    def close(self) -> None:
        """Replaces no connection any more. Idempotent."""
        if self._troubles is not None:
            self._troubles.close()

    def _troubles_of(self, proxy: _native.Proxy) -> NodeTroubles:
        if self._troubles is None:
            plan = self._job.reconnection
            assert plan is not None
            self._troubles = NodeTroubles(
                lambda node: f"[md{self._job.device}] {name_of_node(self._job, node)}",
                self._job.node_patience_ms / 1000,
                lambda: self._reconnect(plan, proxy),
                may_lose_nodes=self._job.may_lose_nodes,
            )
        return self._troubles

    def node_ended(self, node: int, device: int, proxy: _native.Proxy | None) -> None:
        """When all devices of this node have seen another node's end, no more of its messages can arrive."""
        seen = self._ended_at.setdefault(node, set())
        seen.add(device)
        if len(seen) == self._job.num_devices and proxy is not None:
            proxy.node_ended(node)

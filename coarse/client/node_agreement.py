"""Workers of different nodes must register the same tensors: they compare them through the rendezvous store."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Collection
from typing import TypeVar

from coarse.errors import CoarseError, RendezvousError, SyncTimeoutError, WorkerLostError, told_error
from coarse.process.late_notice import LateNotice
from coarse.rendezvous.workers import NodeMap
from coarse.store import Store
from coarse.wire.registration import GroupSchema, check_agreement

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.1  # a wait for another node checks this node's memory devices this often


class NodeAgreement:
    """One worker's part in the agreement of all nodes. Free in a job of one node.

    The memory devices of a node compare the registrations of its workers. Then the node's first worker publishes the
    schema, and every worker waits for all nodes. So every device of every node has mapped a tensor group before any
    worker pushes to it.

    Args:
        rank: This worker's rank.
        nodes: The nodes of the job.
        store: The session's store; None in a job of one node, which does not use it.
        timeout_s: How long to wait for other nodes.
        warn_after_s: Seconds before the wait is logged; 0 disables logging.
        may_lose_workers: Whether the session goes on without lost workers. Then all workers of a node publish
            the same, because any of them may be lost.
    """

    def __init__(
        self,
        rank: int,
        nodes: NodeMap,
        store: Store | None,
        *,
        timeout_s: float,
        warn_after_s: float = 0.0,
        may_lose_workers: bool = False,
    ) -> None:
        self._rank = rank
        self._nodes = nodes
        self._node = nodes.node_of(rank)
        self._store = store
        self._timeout_s = timeout_s
        self._warn_after_s = warn_after_s
        self._may_lose_workers = may_lose_workers
        self._lost: set[int] = set()

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the job."""
        return self._nodes.num_nodes

    @property
    def ranks_elsewhere(self) -> tuple[int, ...]:
        """The workers of all other nodes."""
        return tuple(r for node, ranks in enumerate(self._nodes.ranks) if node != self._node for r in ranks)

    def confirm(self, group: int, schema: GroupSchema, departed: Callable[[], set[int]]) -> None:
        """Returns when all nodes have registered `schema` as `group`.

        Args:
            group: Number of the group.
            schema: The tensors that this node's workers have registered.
            departed: Returns the workers that have closed the session. Called during the wait; raises if the session
                is lost.

        Raises:
            SchemaMismatchError: If a node has registered different tensors; names the first difference.
            OutOfDeviceMemoryError: If a node cannot hold the tensors.
            WorkerLostError: If a node has left instead.
            SyncTimeoutError: If a node does not register in time.
        """
        if self._nodes.num_nodes == 1:
            return
        self._publish(group, schema.to_message(group))
        first: tuple[int, GroupSchema] | None = None
        for node in range(self._nodes.num_nodes):
            if (registered := self._schema(group, node, schema, departed)) is None:
                continue
            each = self._nodes.ranks[node][0], registered
            if first is None:
                first = each
            else:
                check_agreement(*first, *each)

    def note_lost(self, nodes: Collection[int]) -> None:
        """Notes nodes that are lost and register nothing any more."""
        self._lost.update(nodes)

    def refuse(self, group: int, error: CoarseError) -> None:
        """Informs other nodes that this node does not register `group`."""
        if self._nodes.num_nodes > 1:
            self._publish(group, {"error": type(error).__name__, "text": str(error)})

    def _publish(self, group: int, message: dict[str, object]) -> None:
        if self._may_lose_workers or self._rank == self._nodes.ranks[self._node][0]:
            assert self._store is not None
            store, value = self._store, json.dumps(message).encode()
            self._ask(lambda: store.set(f"group/{group}/{self._node}", value))

    def _schema(
        self, group: int, node: int, own: GroupSchema, departed: Callable[[], set[int]]
    ) -> GroupSchema | None:
        """What a node has registered; None if the node is lost."""
        if node == self._node:
            return own
        value = self._wait(group, node, own.name, departed)
        if value is None:
            return None
        message = json.loads(value)
        if "error" in message:
            raise told_error(message["error"], f"{self._nodes.describe(node)} refused: {message['text']}")
        return GroupSchema.from_message(message)

    def _wait(self, group: int, node: int, name: str, departed: Callable[[], set[int]]) -> bytes | None:
        deadline = time.monotonic() + self._timeout_s
        leader = self._nodes.ranks[node][0]
        has_left = False
        assert self._store is not None
        store, key = self._store, f"group/{group}/{node}"
        notice = LateNotice(self._warn_after_s, lambda waited_s: self._tell_late(waited_s, node, name))
        while node not in self._lost:
            notice.look()
            patience_s = 0.0 if has_left else _LOOK_INTERVAL_S
            try:
                return self._ask(functools.partial(store.get, key, patience_s))
            except TimeoutError:
                pass
            if has_left:
                raise WorkerLostError(
                    f"worker(s) {leader} closed the session while others still register {name}. Wrap the "
                    "same models on every worker."
                )
            has_left = leader in departed()  # it has published its registrations before leaving
            if time.monotonic() >= deadline:
                raise SyncTimeoutError(
                    f"worker {self._rank}: registering {name}: {self._nodes.describe(node)} has not registered "
                    f"it within {self._timeout_s:.1f} s. A worker that has not reached this point blocks all "
                    "others."
                )
        return None

    def _ask(self, ask: Callable[[], _T]) -> _T:
        """Asks the store, which worker 0 serves, and which may be lost with it."""
        try:
            return ask()
        except TimeoutError:
            raise
        except (RendezvousError, RuntimeError, OSError) as error:  # those of all frameworks' stores
            if not self._may_lose_workers:
                raise
            raise WorkerLostError(
                f"worker {self._rank}: nodes compare what they register in the job's store, which cannot be reached "
                f"({error}). It is lost with worker 0. Build models and optimizers before the first step, or start "
                "the job again"
            ) from error

    def _tell_late(self, waited_s: float, node: int, name: str) -> None:
        logger.warning(
            "[w%d] has waited %.0f s for %s to register %s; gives up after %g s (COARSE_TIMEOUT_S). All "
            "workers must make this call",
            *(self._rank, waited_s, self._nodes.describe(node), name, self._timeout_s),
        )

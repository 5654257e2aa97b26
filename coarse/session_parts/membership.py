"""The members of a session, and how a worker enters and leaves it (docs/guides/elastic.md)."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

from coarse.client.membership.members import WorldChange
from coarse.client.membership.termination_notice import TerminationNotice
from coarse.env import notes_pipe
from coarse.session_parts.session_client import SessionClient
from coarse.status.launcher_notes import tell_launcher
from coarse.worker_state import WorkerState, checked

logger = logging.getLogger("coarse.session")


class Membership:
    """One worker's membership. In a job of one worker nobody else is a member, and none comes or leaves.

    Args:
        rank: Rank of this worker.
        least_workers: Workers without whom the job does not go on; 0 if it needs all of them.
        client: The session's client.
        node_ranks: Ranks of the workers of this node.
    """

    def __init__(
        self, rank: int, least_workers: int, client: SessionClient, node_ranks: Sequence[int]
    ) -> None:
        self._rank = rank
        self._node_ranks = frozenset(node_ranks)
        self._least_workers = least_workers
        self._client = client
        self.worker_state: Mapping[str, WorkerState] = {}
        """The `state` of join_training()."""
        self._on_leave: list[Callable[[], object]] = []
        may_leave = weakref.WeakMethod(self._may_leave)  # the notice must not keep the session alive
        self.notice = TerminationNotice(
            lambda: (may := may_leave()) is not None and may(),
            lambda: tell_launcher(notes_pipe(), {"is_leaving": rank}),
        )
        """SIGTERM, which asks this worker to leave."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Session.members."""
        client = self._client.of_several()
        return (self._rank,) if client is None else client.members.ranks

    def remove(self, lost: Collection[int]) -> None:
        """Session.remove_members()."""
        if client := self._client.of_several():
            client.members.remove(lost)

    def on_change(self, callback: Callable[[WorldChange], object]) -> None:
        """Session.on_change()."""
        if client := self._client.of_several():
            client.members.on_change(callback)

    def on_newcomers(self, callback: Callable[[frozenset[int]], object]) -> None:
        """Session.on_newcomers()."""
        if client := self._client.of_several():
            client.members.on_newcomers(callback)

    def on_leave(self, callback: Callable[[], object]) -> None:
        """Session.on_leave()."""
        self._on_leave.append(callback)

    @property
    def is_newcomer(self) -> bool:
        """Session.is_newcomer."""
        client = self._client.of_several()
        return client is not None and client.is_newcomer

    def join_training(self, state: Mapping[str, WorkerState] | None) -> int:
        """Session.join_training()."""
        client = self._client.of_several()
        if state is not None:
            self.worker_state = checked(state)
        if client is None:
            return 0
        client.join_training()
        return client.num_begun_steps

    def heed_notices(self) -> None:
        """Makes SIGTERM ask this worker to leave, if the others can continue without it."""
        if self._least_workers:
            self.notice.open()

    def heed_notices_from_entry(self) -> None:
        """Does so once this newcomer is a member."""
        heed_notices = weakref.WeakMethod(self.heed_notices)
        self._client.linked().on_entry(lambda: (heed := heed_notices()) is not None and heed())

    def announce_departure(self) -> bool:
        """Tells the launcher that this worker leaves early; returns whether there is a job that it can leave.

        Raises:
            ValueError: If the job cannot continue without lost workers.
        """
        client = self._client.if_open
        if client is None:
            return False
        if not self._least_workers:
            raise ValueError(
                f"worker {self._rank} cannot leave early: the others need it. Set COARSE_MIN_WORKERS, and "
                "they continue without it; or give every worker the same number of steps, and call close()"
            )
        for callback in self._on_leave:
            callback()
        steps = client.count_steps()
        tell_launcher(notes_pipe(), {"left": self._rank, "step": steps, "is_asked": self.notice.has_come})
        logger.info("[w%d] leaves at step %d", self._rank, steps)
        return True

    def close(self) -> None:
        """Gives SIGTERM its usual effect back. Idempotent."""
        self.notice.close()

    def _may_leave(self) -> bool:
        client = self._client.if_open
        if client is None or len(client.members.ranks) <= self._least_workers:
            return False
        is_alone = self._node_ranks & {*client.members.ranks} == {self._rank}
        return not (is_alone and client.has_other_nodes)  # whose memory devices end with it

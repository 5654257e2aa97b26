"""Newcomers get what workers hold themselves from a member (docs/design/membership.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from coarse.errors import CheckpointError, OutOfDeviceMemoryError, WorkerLostError
from coarse.session import Session
from coarse.torch.ddp.state.stored_state import OwnState, free_parts, load_state, store_refusal, store_state

logger = logging.getLogger(__name__)


class StateTransfer:
    """One worker's part in giving newcomers the state of a member. One caller at a time.

    The member of the lowest rank that is no newcomer itself stores its state in the memory devices. All wait until it
    has done so. If it is lost meanwhile, the next one stores its state.

    Args:
        session: The session of the workers.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rank = session.identity.rank
        self._parts: list[str] = []  # that this worker has stored

    def give(self, read: Callable[[], OwnState], newcomers: frozenset[int], *, step: int) -> None:
        """Gives newcomers the state of a member. Collective, as take() on the newcomers.

        Args:
            read: Returns this worker's state.
            newcomers: Ranks of the workers that take() it.
            step: Number of the step that begins.
        """
        self._meet(newcomers, lambda: self._store(read, step))

    def take(self, tensors: Sequence[torch.Tensor], newcomers: frozenset[int]) -> Any:
        """Overwrites this newcomer's tensors with those of a member; returns the member's other values. Collective.

        Args:
            tensors: As OwnState.tensors of the members.
            newcomers: Ranks of all newcomers, with this one.

        Raises:
            CoarseError: If the member cannot provide its state, or has other tensors.
            WorkerLostError: If no member is left.
        """
        began_s = time.monotonic()
        provider = self._meet(newcomers, lambda: None)
        values = load_state(self._session, tensors)
        passed_s = time.monotonic() - began_s
        logger.info("[w%d] has the state of worker %d, after %.3f s", self._rank, provider, passed_s)
        return values

    def free(self) -> None:
        """Frees the memory of the state that this worker has stored, if any: newcomers have it, or are lost."""
        free_parts(self._session, self._parts)
        self._parts = []

    def _meet(self, newcomers: frozenset[int], store: Callable[[], None]) -> int:
        """Returns the rank of the member that has stored its state; the same on all workers."""
        for rank in sorted({*self._session.members} - newcomers):
            if rank == self._rank:
                store()
            has_stored = np.array([rank == self._rank], np.int32)
            self._session.all_reduce(has_stored, op="max")
            if has_stored[0]:
                return rank
        raise WorkerLostError(
            f"worker {self._rank}: all workers whose state it was to take over are lost; start the job again"
        )

    def _store(self, read: Callable[[], OwnState], step: int) -> None:
        """Stores the state, or the reason why that is impossible, which ends the newcomers and not the members."""
        began_s = time.monotonic()
        try:
            # Another member may still free what it has stored for newcomers of the step before.
            self._parts = store_state(self._session, read(), place=step % 2)
        except (CheckpointError, OutOfDeviceMemoryError) as error:
            reason = f"worker {self._rank} cannot give its state to new workers: {error}"
            logger.warning("[w%d] %s", self._rank, reason)
            store_refusal(self._session, reason)
            return
        passed_s = time.monotonic() - began_s
        logger.info("[w%d] has stored its state for new workers in %.3f s", self._rank, passed_s)

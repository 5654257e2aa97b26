"""Follows the links between GPUs while a job trains (COARSE paper, section III-E; docs/design/gpu.md)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coarse.tuning.tuned_session import TunedSession

if TYPE_CHECKING:
    from coarse.client.tensor_group import TensorGroup

logger = logging.getLogger(__name__)


class GpuReplanner:
    """Watches the steps of one tensor group, and moves its slots when links between GPUs have changed.

    Like Replanner it works between two steps, after the same step on every worker, and does not change results.

    Args:
        session: The group's session.
        group: A group whose tensors are on a GPU, on every worker, and whose slots can be moved.
        gpu: UUID of this worker's GPU.
        every_steps: Steps between two checks of the links, at least 1.
    """

    def __init__(self, session: TunedSession, group: TensorGroup, *, gpu: str, every_steps: int) -> None:
        self._session = session
        self._group = group
        self._gpu = gpu
        self._every_steps = every_steps
        self._num_steps = 0
        self.decisions: list[str] = []
        """Decisions, one line each."""
        group.watch(None, self._step_done)

    def _step_done(self, contributors: Sequence[int]) -> None:
        """Called when every worker has pulled all tensors of a step."""
        self._num_steps += 1
        if self._num_steps % self._every_steps or max(contributors) < self._group.num_workers:
            return  # a worker that has run out of inputs is later than the others
        try:
            has_moved = self._session.move_slots(self._group, self._gpu)
        except ValueError as error:  # every worker gets it
            self._group.watch(None, None)
            self._decide(f"replanning: none in {self._group.name}: {error}")
            return
        if has_moved:
            self._session.metrics_writer.add("coarse_replans_total")
            tables = [replace(table, reasons=()) for table in self._group.schema.routes]
            routes = ", ".join(f"w{worker} to {table}" for worker, table in enumerate(tables))
            self._decide(f"step {self._num_steps}: the slots of {self._group.name} move: {routes}")

    def _decide(self, text: str) -> None:
        self.decisions.append(text)
        if self._session.identity.rank == 0:
            logger.info("[w0] %s", text)

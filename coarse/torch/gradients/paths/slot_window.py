"""Gradients that take turns in fewer slots than parameters."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable

from coarse.client.memory.slot_order import find_predecessors
from coarse.client.tensor_group import TensorGroup
from coarse.torch.gradients.paths.gradient_path import GradientPath

_MOST_PATIENCE_S = 20.0


class SlotWindow:
    """Sends each gradient when all earlier gradients that used bytes of its slot are complete.

    No worker waits forever, in whichever order gradients arrive on different workers (docs/design/optimizer.md).

    Args:
        group: Its tensors share slots.
        path: The path of the gradients.
        send: Sends a gradient, or its absence; then a mean of other nodes may arrive in its slot.
        most_waiting_bytes: If more bytes of gradients wait, backward waits for memory devices before it continues.
            It waits at most _MOST_PATIENCE_S, because another worker may be waiting for a gradient that has not
            arrived here yet. Each wait without success halves this limit. None for no bound.
    """

    def __init__(
        self,
        group: TensorGroup,
        path: GradientPath,
        send: Callable[[int], object],
        *,
        most_waiting_bytes: int | None = None,
    ) -> None:
        self._group = group
        self._path = path
        self._send = send
        self._most_waiting_bytes = most_waiting_bytes
        self._patience_s = _MOST_PATIENCE_S
        self._nbytes = [spec.nbytes for spec in group.specs]
        self._predecessors = find_predecessors([group.slot(i) for i in range(len(group.specs))])
        self.restart()

    def restart(self) -> None:
        """Begins another backward; drops the last backward's waiting gradients."""
        self._is_patient = True
        self._sent = bytearray(len(self._predecessors))
        self._waiting: list[int] = []  # from the last parameter to the first

    def is_free(self, index: int) -> bool:
        """Whether the slot's previous gradients have been sent and are complete."""
        for predecessor in self._predecessors[index]:
            if not self._sent[predecessor] or self._path.is_late(predecessor):
                return False
        return True

    def take(self, index: int) -> None:
        """Sends a gradient if its slot is free, otherwise queues it; sends queued gradients whose slots are free."""
        bisect.insort(self._waiting, index, key=operator.neg)
        # Checked at every call, because memory devices free slots meanwhile and queued gradients accumulate.
        num_waiting = len(self._waiting)
        while self._waiting and self.is_free(self._waiting[0]):
            self._go(self._waiting[0])
        if index in self._waiting[1:] and self.is_free(index):
            self._go(index)
        if not self._waiting:
            return
        if len(self._waiting) < num_waiting:
            for waiting in [each for each in self._waiting if self.is_free(each)]:
                self._go(waiting)
        self._path.flush()  # other workers may wait for pending sends
        self._hold_back()

    def _hold_back(self) -> None:
        """Waits for slots while too many bytes of gradients are queued."""
        while self._is_patient and self._has_too_many():
            first = self._waiting[0]
            late = [each for each in self._predecessors[first] if self._path.is_late(each)]
            if not all(self._sent[each] for each in self._predecessors[first]):
                return  # its slot belongs to a gradient that has not arrived here yet
            if not all(self._wait_for(each) for each in late):
                return
            self._go(first)

    def _has_too_many(self) -> bool:
        if self._most_waiting_bytes is None:
            return False
        waiting_bytes = sum(map(self._nbytes.__getitem__, self._waiting))
        return waiting_bytes > self._most_waiting_bytes

    def _wait_for(self, index: int) -> bool:
        """Waits for a gradient's update to be complete; returns whether it is."""
        if self._group.is_complete_within(index, self._patience_s):
            self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE_S)
            return True
        self._patience_s /= 2
        self._is_patient = False  # until the next backward
        return False

    def finish(self) -> None:
        """Waits for the slots one by one; all workers use the same order, so the wait ends."""
        while self._waiting:
            first = self._waiting[0]
            for predecessor in self._predecessors[first]:
                if self._path.is_late(predecessor):
                    self._group.pull(predecessor)
            self._go(first)

    def _go(self, index: int) -> None:
        self._waiting.remove(index)
        self._sent[index] = 1
        self._send(index)

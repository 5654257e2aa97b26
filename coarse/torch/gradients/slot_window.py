"""Gradients that take turns in fewer slots than there are parameters."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable

from coarse.client.memory.slot_order import find_predecessors
from coarse.client.tensor_group import TensorGroup
from coarse.torch.gradients.gradient_path import GradientPath

_MOST_PATIENCE_S = 20.0


class SlotWindow:
    """Sends each gradient when all that had bytes of its slot before are out of the way.

    Nobody waits for ever, whatever order gradients come in on different workers (docs/design/optimizer.md).

    Args:
        group: Its tensors share slots.
        path: By which gradients go.
        send: Sends a gradient, or that there is none: then a mean of other nodes comes to its slot.
        most_waiting_bytes: When gradients of more bytes wait, backward waits for memory devices before it goes on. At
            most _MOST_PATIENCE_S, for another worker may itself wait for a gradient that is still to come here, and
            half as long each time that this was in vain. None for no bound.
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
        self._predecessors = find_predecessors([group.slot(i) for i in range(len(group.specs))])
        self.restart()

    def restart(self) -> None:
        """Another backward begins; nothing of the last one waits any more."""
        self._is_patient = True
        self._sent = bytearray(len(self._predecessors))
        self._waiting: list[int] = []  # from the last parameter to the first

    def is_free(self, index: int) -> bool:
        """Whether whatever had the slot before has been sent, and is complete."""
        return all(self._sent[p] and not self._path.is_late(p) for p in self._predecessors[index])

    def take(self, index: int) -> None:
        """Sends a gradient if its slot is free, else it waits; and sends those whose slots have become free."""
        bisect.insort(self._waiting, index, key=operator.neg)
        has_sent = False
        # Each time anew: a slot becomes free by what memory devices do meanwhile, and gradients that wait pile up.
        while self._waiting and self.is_free(self._waiting[0]):
            self._go(self._waiting.pop(0))
            has_sent = True
        if self.is_free(index) and not self._sent[index]:
            self._waiting.remove(index)
            self._go(index)
            has_sent = True
        if has_sent:
            for waiting in [each for each in self._waiting if self.is_free(each)]:
                self._waiting.remove(waiting)
                self._go(waiting)
        if self._waiting:
            self._path.flush()  # nobody is to wait for what is held back here
            self._hold_back()

    def _hold_back(self) -> None:
        """Waits for slots while gradients of too many bytes wait for them."""
        while self._is_patient and self._has_too_many():
            first = self._waiting[0]
            late = [each for each in self._predecessors[first] if self._path.is_late(each)]
            if not all(self._sent[each] for each in self._predecessors[first]):
                return  # its slot is that of a gradient which is still to come here
            if not all(self._wait_for(each) for each in late):
                return
            self._go(self._waiting.pop(0))

    def _has_too_many(self) -> bool:
        if self._most_waiting_bytes is None:
            return False
        waiting_bytes = sum(self._group.specs[each].nbytes for each in self._waiting)
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
        """Waits for one slot after the other; all workers do in the same order, so that it ends."""
        while self._waiting:
            index = self._waiting.pop(0)
            for predecessor in self._predecessors[index]:
                if self._path.is_late(predecessor):
                    self._group.pull(predecessor)
            self._go(index)

    def _go(self, index: int) -> None:
        self._sent[index] = 1
        self._send(index)

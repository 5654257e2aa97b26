"""Memory controllers with a request tracker (sections 3.1 and 4.2.5)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from coarse.simulator.studies.coherence.operations import Hop, Kind, Locks, Waiting

T = TypeVar("T")


class RequestTracker:
    """Serves requests of all GPUs to one part of memory, each line's one after the other.

    A request to a line in flight waits. So does one that finds all slots taken. An admitted request takes effect at
    once: that moment orders loads and stores of a line.

    Args:
        number: Of the controller.
        slots: Requests served at a time (4 in the document).
        released: As of Locks.
        holds_slots_to_the_end: Whether a slot is taken until the memory has answered, or only while data cross its
            channel.
    """

    def __init__(
        self, number: int, released: list[Waiting], *, slots: int = 4, holds_slots_to_the_end: bool = False
    ) -> None:
        self._in_flight = Locks(released)
        self._slots, self._free_slots, self._released = slots, slots, released
        self._holds_slots = holds_slots_to_the_end
        self._full = Waiting()
        self._transfer = Hop(("channel", number), Kind.SERVICE, Kind.SERVICE.nbytes)
        self._latency = Hop(("memory", number), Kind.SERVICE, 0)
        self.accesses = self.conflicts = 0

    def serve(self, line: int, effect: Callable[[], T]) -> Generator[Hop | Waiting, None, T]:
        """Calls `effect` when the line's turn has come."""
        while (waiting := self._obstacle(line)) is not None:
            yield waiting
        self._in_flight.hold(line)
        self._free_slots -= 1
        self.accesses += 1
        result = effect()
        yield self._transfer
        if not self._holds_slots:
            self._free_one()
        yield self._latency
        if self._holds_slots:
            self._free_one()
        self._in_flight.free(line)
        return result

    def _obstacle(self, line: int) -> Waiting | None:
        if line in self._in_flight:
            self.conflicts += 1
            self._let_one_in()  # an admitted request that waits for a line leaves its slot to the next
            return self._in_flight[line]
        return self._full if self._free_slots == 0 else None

    def _free_one(self) -> None:
        self._free_slots += 1
        self._let_one_in()

    def _let_one_in(self) -> None:
        if self._full and self._free_slots:
            self._released.append(Waiting([self._full.pop(0)]))

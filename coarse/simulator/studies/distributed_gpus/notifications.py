"""GASPI's put and notify: writes and flags through queues, and the target's side (sections 4.2.2 and 4.2.6).

Requests of one queue arrive in order, those of different queues in any order. `write_notify` posts data and flag to
the same queue, so a flag that is seen says that the data has arrived. Resetting a flag is atomic: it returns the
value that it clears.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Segment:
    """The target's memory: data by offset, flags by number."""

    data: dict[int, object] = field(default_factory=dict)
    flags: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Queues:
    """The source's queues to one segment."""

    segment: Segment
    waiting: dict[int, deque[tuple[str, int, object]]] = field(default_factory=dict)

    def write(self, offset: int, value: object, *, queue: int) -> None:
        """Posts data."""
        self.post(("data", offset, value), queue)

    def notify(self, number: int, value: int, *, queue: int) -> None:
        """Posts a flag."""
        self.post(("flag", number, value), queue)

    def write_notify(self, offset: int, value: object, *, number: int, flag: int, queue: int) -> None:
        """Posts data, then its flag, to one queue."""
        self.write(offset, value, queue=queue)
        self.notify(number, flag, queue=queue)

    def post(self, request: tuple[str, int, object], queue: int) -> None:
        """Adds a request to a queue."""
        self.waiting.setdefault(queue, deque()).append(request)

    def deliver(self, choice: int) -> bool:
        """Lets the oldest request of one queue arrive; `choice` says of which. Returns whether there was one."""
        busy = sorted(queue for queue, requests in self.waiting.items() if requests)
        if not busy:
            return False
        kind, place, value = self.waiting[busy[choice % len(busy)]].popleft()
        if kind == "data":
            self.segment.data[place] = value
        else:
            assert isinstance(value, int)
            self.segment.flags[place] = value
        return True


def wait_some(segment: Segment, first: int, count: int) -> Iterator[int | None]:
    """Polls flags until one is set: yields None at each step without one, then the number of the flag."""
    while True:
        found = [number for number in range(first, first + count) if segment.flags.get(number, 0)]
        if found:
            yield found[0]
            return
        yield None


def reset(segment: Segment, number: int) -> Iterator[int | None]:
    """Clears a flag and yields its value, in one step. 0 means that another thread was first."""
    yield segment.flags.pop(number, 0)

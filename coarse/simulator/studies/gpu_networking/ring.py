"""ComP-Net's queue from a work-group to a command processor thread (slides 24 to 33).

The producer keeps the write index and a copy of the read index; it refreshes the copy only if the ring looks full.
Each entry has a status flag at the coherence point: 1 hands the entry to the consumer, 0 says that its operation
is complete. Both are stored with release. COARSE's descriptor queue has the same shape
(docs/design/queue-protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coarse.simulator.studies.gpu_networking.memory import SharedMemory, Word

READ_INDEX: Word = ("read index", 0)

_PRODUCER, _CONSUMER = "work-group", "command processor"


def entry_word(position: int, capacity: int) -> Word:
    """The entry of a position of the endless sequence."""
    return ("entry", position % capacity)


def status_word(position: int, capacity: int) -> Word:
    """The status flag of that entry."""
    return ("status", position % capacity)


@dataclass(slots=True)
class Producer:
    """The work-group's end. Each `next()` of a generator that it returns is one atomic step."""

    memory: SharedMemory
    capacity: int
    write_index: int = 0
    local_read_index: int = 0

    def post(self, request: object) -> Iterator[str]:
        """Hands over one request; waits while the ring is full. Says each step in words."""
        while self.is_full():
            self.refresh()
            yield "full: refreshes its read index"
        self.memory.store(_PRODUCER, entry_word(self.write_index, self.capacity), request)
        yield "fills the entry"
        self.publish()
        yield "sets the status, with release"
        self.write_index += 1

    def is_full(self) -> bool:
        """By the local read index, which may be behind."""
        return self.write_index - self.local_read_index >= self.capacity

    def refresh(self) -> None:
        """Loads the global read index."""
        read = self.memory.load(_PRODUCER, READ_INDEX)
        assert isinstance(read, int)
        self.local_read_index = read

    def publish(self) -> None:
        """Hands the entry over: everything stored before is visible with it."""
        self.memory.store_release(_PRODUCER, status_word(self.write_index, self.capacity), 1)

    def is_complete(self, position: int) -> bool:
        """Whether the operation at a position of the sequence is complete.

        Only for the last `capacity` positions that were posted.
        """
        return self.memory.load(_PRODUCER, status_word(position, self.capacity)) == 0


@dataclass(slots=True)
class Consumer:
    """The command processor's end. `perform` is the network operation."""

    memory: SharedMemory
    capacity: int
    perform: Callable[[object], None]
    read_index: int = 0

    def serve(self) -> Iterator[str]:
        """Serves one request; waits until there is one. Says each step in words."""
        while self.memory.load(_CONSUMER, status_word(self.read_index, self.capacity)) != 1:
            yield "polls the status"
        request = self.memory.load(_CONSUMER, entry_word(self.read_index, self.capacity))
        yield "reads the entry"
        yield from self.finish(request)
        self.read_index += 1
        self.memory.store_release(_CONSUMER, READ_INDEX, self.read_index)
        yield "advances the read index, with release"

    def finish(self, request: object) -> Iterator[str]:
        """Performs the operation, then says that it is complete."""
        self.perform(request)
        yield "performs the operation"
        self.memory.store_release(_CONSUMER, status_word(self.read_index, self.capacity), 0)
        yield "clears the status, with release"

"""Triggered operations of GPU-TN: {operation, tag, counter, threshold} in the network interface (slides 41 and 42).

The host registers an operation off the critical path. Each trigger of its tag adds one to the counter, and the
operation starts when the counter reaches the threshold. A trigger may come before its registration: it allocates a
null entry, whose count the registration takes over. Every operation starts exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Entry:
    """One tag of the trigger list. Without operation and threshold it is a null entry, which only counts."""

    counter: int = 0
    threshold: int | None = None
    operation: str | None = None
    has_fired: bool = False


@dataclass(slots=True)
class TriggerList:
    """The trigger list of one network interface. Calls are atomic, in any order.

    A tag belongs to one operation for the life of the list.
    """

    entries: dict[int, Entry] = field(default_factory=dict)
    fired: list[str] = field(default_factory=list)
    """Operations in the order in which they started."""

    def register(self, operation: str, *, tag: int, threshold: int) -> bool:
        """Adds an operation; returns whether it starts at once, because enough triggers came first.

        Raises:
            ValueError: If the tag has an operation already, or the threshold is below 1.
        """
        entry = self.entry(tag)
        if entry.operation is not None:
            raise ValueError(
                f"tag {tag} belongs to operation {entry.operation}; {operation} needs another one"
            )
        if threshold < 1:
            raise ValueError(
                f"operation {operation}: a threshold of {threshold} needs no trigger; use at least 1"
            )
        entry.operation, entry.threshold = operation, threshold
        return self.fire_if_due(entry)

    def trigger(self, tag: int) -> bool:
        """Counts a trigger; returns whether its operation starts now."""
        entry = self.entry(tag)
        entry.counter += 1
        return self.fire_if_due(entry)

    def entry(self, tag: int) -> Entry:
        """The entry of a tag; a null entry if there is none yet."""
        return self.entries.setdefault(tag, Entry())

    def fire_if_due(self, entry: Entry) -> bool:
        """Starts the entry's operation if it is registered, has its triggers, and did not start before."""
        if entry.has_fired or not is_due(entry):
            return False
        entry.has_fired = True
        assert entry.operation is not None
        self.fired.append(entry.operation)
        return True


def is_due(entry: Entry) -> bool:
    """Whether a registered operation has its triggers (slide 42: counter >= threshold)."""
    return entry.threshold is not None and entry.counter >= entry.threshold

"""Memory shared by actors whose plain stores become visible late and in any order.

Each actor has a store buffer. Plain stores leave it whenever the schedule says so, in any order but for stores to the
same word. A release store becomes visible after everything that its actor stored before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Word = tuple[str, int]
"""A word's name and index, e.g. ("status", 2)."""


class Store(NamedTuple):
    """A store that is not visible yet."""

    actor: str
    word: Word
    value: object


@dataclass(slots=True)
class SharedMemory:
    """Words that start as 0."""

    visible: dict[Word, object] = field(default_factory=dict)
    pending: list[Store] = field(default_factory=list)

    def load(self, actor: str, word: Word) -> object:
        """The actor's own last store to the word, or else the visible value."""
        own = [store.value for store in self.pending if (store.actor, store.word) == (actor, word)]
        return own[-1] if own else self.visible.get(word, 0)

    def store(self, actor: str, word: Word, value: object) -> None:
        """A plain store."""
        self.pending.append(Store(actor, word, value))

    def store_release(self, actor: str, word: Word, value: object) -> None:
        """A store that is visible now, and with it everything that the actor stored before."""
        for store in [each for each in self.pending if each.actor == actor]:
            self.visible[store.word] = store.value
        self.pending = [each for each in self.pending if each.actor != actor]
        self.visible[word] = value

    def propagate(self, choice: int) -> None:
        """Makes one pending store visible: `choice` selects it among those without an earlier store to their word."""
        free = [
            position
            for position, store in enumerate(self.pending)
            if store[:2] not in [earlier[:2] for earlier in self.pending[:position]]
        ]
        if free:
            store = self.pending.pop(free[choice % len(free)])
            self.visible[store.word] = store.value

"""The workers of a session that take part in its steps, as every worker sees them after the same step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldChange:
    """The members before and after some were lost, have left or have joined. Equal on all members.

    The world sizes are `len(change.old)` and `len(change.new)`.

    Args:
        old: Ranks of the members before, in ascending order.
        new: Ranks of the members from now on, in ascending order.
    """

    old: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def joined(self) -> frozenset[int]:
        """Ranks of the workers that are new."""
        return frozenset(self.new) - frozenset(self.old)

    @property
    def left(self) -> frozenset[int]:
        """Ranks of the workers that do not take part any more: they were lost, or have left as planned."""
        return frozenset(self.old) - frozenset(self.new)


class Members:
    """All workers at first, then those that were not lost, and newcomers in their places. One caller at a time.

    Args:
        ranks: Ranks of all workers.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        """Ranks of the members."""
        self._on_change: list[Callable[[WorldChange], object]] = []
        self._on_newcomers: list[Callable[[frozenset[int]], object]] = []

    def on_change(self, callback: Callable[[WorldChange], object]) -> None:
        """Calls back whenever the members change."""
        self._on_change.append(callback)

    def on_newcomers(self, callback: Callable[[frozenset[int]], object]) -> None:
        """Calls back with newcomers when they become members, also if one has the rank of a member just lost."""
        self._on_newcomers.append(callback)

    def begin(self, ranks: Iterable[int]) -> None:
        """Notes the members with which this newcomer begins; tells nobody, because it has seen no others."""
        self.ranks = tuple(sorted(ranks))

    def welcome(self, newcomers: frozenset[int]) -> None:
        """Notes that newcomers are members from now on."""
        for callback in self._on_newcomers:
            callback(newcomers)
        self._replace({*self.ranks, *newcomers})

    def remove(self, lost: Collection[int]) -> None:
        """Notes that workers have not contributed to a step."""
        self._replace(rank for rank in self.ranks if rank not in lost)

    def _replace(self, ranks: Iterable[int]) -> None:
        members = tuple(sorted(ranks))
        if members == self.ranks:
            return
        change = WorldChange(old=self.ranks, new=members)
        self.ranks = members
        for callback in self._on_change:
            callback(change)

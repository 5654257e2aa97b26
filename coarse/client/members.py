"""The workers of a session that take part in its steps, as every worker sees them after the same step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable


class Members:
    """All workers at first, then those that were not lost, and newcomers in their places. One caller at a time.

    Args:
        ranks: Ranks of all workers.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        """Ranks of the members."""
        self._callbacks: list[Callable[[tuple[int, ...]], object]] = []
        self._on_newcomers: list[Callable[[frozenset[int]], object]] = []

    def on_change(self, callback: Callable[[tuple[int, ...]], object]) -> None:
        """Calls back with the members whenever they change."""
        self._callbacks.append(callback)

    def on_newcomers(self, callback: Callable[[frozenset[int]], object]) -> None:
        """Calls back with newcomers when they become members, also if one has the rank of a member just lost."""
        self._on_newcomers.append(callback)

    def welcome(self, newcomers: frozenset[int]) -> None:
        """Notes that newcomers are members from now on."""
        for callback in self._on_newcomers:
            callback(newcomers)
        self.replace({*self.ranks, *newcomers})

    def remove(self, lost: Collection[int]) -> None:
        """Notes that workers have not contributed to a step."""
        self.replace(rank for rank in self.ranks if rank not in lost)

    def replace(self, ranks: Iterable[int]) -> None:
        """Notes which workers are members from now on."""
        members = tuple(sorted(ranks))
        if members == self.ranks:
            return
        self.ranks = members
        for callback in self._callbacks:
            callback(members)

"""How the members of a job divide the samples of an epoch among them while members are lost and new ones come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Set
from typing import Any

Spans = list[tuple[int, int]]
"""Samples, as first number and number after the last."""


class SampleDivision:
    """The samples of an epoch that nobody has, and those of each member in the next steps. Knows no dataset.

    A *round* is what all members train on in one step: each takes `batch_size` samples. In the last round of an epoch
    they share what is left. If that is less than a sample for each, nobody takes it. Rounds are divided in the order
    of training, and may be divided ahead of it, as by a loader that loads batches in advance.

    Members stay equal because they make the same calls in the same order: divide() by the number of members that a
    step has shown, use(), lose() and welcome() at the same step. So no message tells who takes what. Each sample is
    given to one member at most; those that a lost member had not used are given to others.

    Samples are positions in the order of the epoch, from 0. From `num_samples` on they are those of the next epoch:
    a newcomer takes them if its first steps are the last ones of an epoch, when all others have been given away.

    Args:
        num_samples: Samples of an epoch.
        batch_size: Samples of a member in a step.
        members: Ranks of the members.
    """

    def __init__(self, num_samples: int, batch_size: int, members: Iterable[int]) -> None:
        self._num_samples, self._batch_size = num_samples, batch_size
        self.members = sorted(members)
        """Ranks of the members."""
        self.epoch = 0
        """Number of the epoch."""
        self.rounds: deque[dict[int, Spans]] = deque()
        """The rounds that no step has used yet: the samples of each member."""
        self._free: Spans = [(0, num_samples)]
        self._next_free: Spans = self._all_of_next_epoch()

    def _all_of_next_epoch(self) -> Spans:
        return [(self._num_samples, 2 * self._num_samples)]

    @property
    def num_free(self) -> int:
        """Samples of this epoch that nobody has."""
        return _count(self._free)

    @property
    def num_rounds_left(self) -> int:
        """Rounds of this epoch that divide() makes if members stay the same."""
        whole, rest = divmod(self.num_free, len(self.members) * self._batch_size)
        return whole + (rest >= len(self.members))

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch, with all of its samples that newcomers have not taken before."""
        self.put_back()
        is_next = epoch == self.epoch + 1
        free = self._next_free if is_next else self._all_of_next_epoch()
        self._free = [(first - self._num_samples, end - self._num_samples) for first, end in free]
        self._next_free = self._all_of_next_epoch()
        self.epoch = epoch

    def divide(self) -> bool:
        """Gives each member its samples for one more round; returns False if the epoch has too few of them."""
        share, rest = divmod(min(self.num_free, len(self.members) * self._batch_size), len(self.members))
        if not share:
            return False
        self.rounds.append(
            {rank: _take(self._free, share + (place < rest)) for place, rank in enumerate(self.members)}
        )
        return True

    def use(self) -> None:
        """Notes that a step uses the oldest round."""
        self.rounds.popleft()

    def put_back(self) -> None:
        """Frees the samples of all rounds that no step has used."""
        for divided in reversed(self.rounds):
            for rank in reversed(self.members):
                self._release(divided[rank])
        self.rounds.clear()

    def lose(self, ranks: Set[int]) -> None:
        """Removes members; what they had not used is the next that divide() gives to the others."""
        self.members = [rank for rank in self.members if rank not in ranks]
        for divided in reversed(self.rounds):
            for rank in sorted(divided.keys() & ranks, reverse=True):
                self._release(divided.pop(rank))

    def _release(self, spans: Spans) -> None:
        for span in reversed(spans):
            (self._free if span[0] < self._num_samples else self._next_free).insert(0, span)

    def welcome(self, ranks: Iterable[int]) -> None:
        """Adds members, which get samples in all rounds that no step has used: free ones, or of the next epoch."""
        for rank in sorted(ranks):
            for divided in self.rounds:
                free = self._free if self.num_free else self._next_free
                divided[rank] = _take(free, min(self._batch_size, _count(free)))
            self.members = sorted([*self.members, rank])

    def state(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        rounds = [[[rank, spans] for rank, spans in divided.items()] for divided in self.rounds]
        free = {"free": list(self._free), "next_free": list(self._next_free)}
        return {"epoch": self.epoch, "members": list(self.members), "rounds": rounds, **free}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over state()."""
        self.load_progress(state)
        self.members = list(state["members"])
        self.rounds = deque({rank: _spans(spans) for rank, spans in divided} for divided in state["rounds"])

    def progress(self) -> dict[str, Any]:
        """What steps have not used, as JSON values; independent of the members."""
        copy = SampleDivision(self._num_samples, self._batch_size, self.members)
        copy.load(self.state())
        copy.put_back()
        return {name: value for name, value in copy.state().items() if name not in ("members", "rounds")}

    def load_progress(self, state: Mapping[str, Any]) -> None:
        """Goes on from progress(), with the present members."""
        self.epoch = int(state["epoch"])
        self._free, self._next_free = _spans(state["free"]), _spans(state["next_free"])
        self.rounds.clear()


def _spans(values: Iterable[Iterable[int]]) -> Spans:
    return [(first, end) for first, end in values]


def _count(spans: Spans) -> int:
    return sum(end - first for first, end in spans)


def _take(spans: Spans, number: int) -> Spans:
    """Removes the first `number` samples and returns them."""
    taken: Spans = []
    while number:
        first, end = spans.pop(0)
        middle = min(end, first + number)
        taken.append((first, middle))
        number -= middle - first
        if middle < end:
            spans.insert(0, (middle, end))
    return taken

"""How the members of a job divide the samples of an epoch among them while members are lost and new ones come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

Spans = list[tuple[int, int]]
"""Samples, as first number and number after the last."""

_MOST_KEPT_ROUNDS = 4
"""Used rounds that are kept. Others notice at most two steps later that a worker has left."""


@dataclass(slots=True)
class Round:
    """The samples of all members in one step.

    Args:
        shares: The samples of each member, by rank.
        num_batches: Batches into which each member divides its share, so that none exceeds the batch size.
    """

    shares: dict[int, Spans]
    num_batches: int

    def batch(self, rank: int, number: int) -> Spans:
        """A batch of a member's share; the last sample again, with a weight of 0, if it has fewer than batches."""
        share = list(self.shares[rank])
        first, end = self._bounds(rank, number)
        first -= first == end and bool(share)
        _take(share, first)
        return _take(share, end - first)

    def weight(self, rank: int, number: int) -> float:
        """Factor for the mean loss of a member's batch.

        If each member adds up the gradients of its batches, the mean of their sums is that over all samples.
        """
        first, end = self._bounds(rank, number)
        return len(self.shares) * (end - first) / sum(map(_count, self.shares.values()))

    def _bounds(self, rank: int, number: int) -> tuple[int, int]:
        """Where a batch begins and ends in a member's share, which batches divide as equally as possible."""
        size, rest = divmod(_count(self.shares[rank]), self.num_batches)
        return number * size + min(number, rest), (number + 1) * size + min(number + 1, rest)


class SampleDivision:
    """The samples of an epoch that nobody has, and those of each member in the next steps. Knows no dataset.

    A *round* has the samples of all members in one step: each takes `batch_size` samples, or all together take
    `global_batch_size`. In the last round of an epoch they share what is left. If that is less than a sample for
    each, nobody takes it. Rounds are divided in the order of training, and may be divided ahead of it, as by a loader
    that loads batches in advance.

    Members stay equal because they make the same calls in the same order: divide() by the number of members that a
    step has shown, use(), lose() and welcome() at the same step. So no message tells who takes what. Each sample is
    given to one member at most; those that a lost member had not used are given to others.

    Samples are positions in the order of the epoch, from 0. From `num_samples` on they are those of the next epoch:
    a newcomer takes them if its first steps are the last ones of an epoch, when all others have been given away.

    Args:
        num_samples: Samples of an epoch.
        batch_size: Samples of a member in a step; with a global batch, the most in one of its batches.
        members: Ranks of the members.
        global_batch_size: Samples of all members in a step; 0 for `batch_size` of each.
    """

    def __init__(
        self, num_samples: int, batch_size: int, members: Iterable[int], global_batch_size: int = 0
    ) -> None:
        self._num_samples, self._batch_size = num_samples, batch_size
        self._global_batch_size = global_batch_size
        self.members = sorted(members)
        """Ranks of the members."""
        self.since = dict.fromkeys(self.members, 0)
        """Used rounds at the moment at which each worker became a member, by rank."""
        self.epoch = 0
        """Number of the epoch."""
        self.rounds: deque[Round] = deque()
        """The rounds that no step has used yet."""
        self.num_used = 0
        """Rounds that steps have used, of all epochs."""
        self._is_reopened = False  # since samples became free when all rounds of this epoch had been used
        self._used: deque[Round] = deque(maxlen=_MOST_KEPT_ROUNDS)
        self._free: Spans = [(0, num_samples)]
        self._next_free: Spans = self._all_of_next_epoch()

    def _all_of_next_epoch(self) -> Spans:
        return [(self._num_samples, 2 * self._num_samples)]

    @property
    def num_free(self) -> int:
        """Samples of this epoch that nobody has."""
        return _count(self._free)

    @property
    def has_samples(self) -> bool:
        """Whether divide() makes a round."""
        return self.num_free >= len(self.members)

    @property
    def num_batches_left(self) -> int:
        """Batches of a member in the rounds that divide() makes in this epoch if members stay the same."""
        whole, rest = divmod(self.num_free, self._samples_of_round)
        last = self._num_batches(rest) if rest >= len(self.members) else 0
        return whole * self._num_batches(self._samples_of_round) + last

    @property
    def _samples_of_round(self) -> int:
        return self._global_batch_size or len(self.members) * self._batch_size

    def _num_batches(self, samples: int) -> int:
        """Batches of the member with the most of these samples."""
        return _divided_up(_divided_up(samples, len(self.members)), self._batch_size)

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch, with all of its samples that newcomers have not taken before."""
        self.put_back()
        is_next = epoch == self.epoch + 1
        free = self._next_free if is_next else self._all_of_next_epoch()
        self._free = [(first - self._num_samples, end - self._num_samples) for first, end in free]
        self._next_free = self._all_of_next_epoch()
        self.epoch = epoch
        self._is_reopened = False
        self._used.clear()

    def reopens(self) -> bool:
        """Whether the epoch goes on, because samples have become free after its last round; says so once."""
        goes_on, self._is_reopened = self._is_reopened and self.has_samples, False
        return goes_on

    def divide(self) -> bool:
        """Gives each member its samples for one more round; returns False if the epoch has too few of them."""
        if not self.has_samples:
            return False
        samples = min(self.num_free, self._samples_of_round)
        share, rest = divmod(samples, len(self.members))
        shares = {rank: _take(self._free, share + (place < rest)) for place, rank in enumerate(self.members)}
        self.rounds.append(Round(shares, self._num_batches(samples)))
        return True

    def batch(self, rank: int, number: int) -> Spans | None:
        """A member's batch, counted from its first one of the oldest round; None if the rounds have fewer."""
        for each in self.rounds:
            if number < each.num_batches:
                return each.batch(rank, number)
            number -= each.num_batches
        return None

    @property
    def num_batches(self) -> int:
        """Batches of a member in the rounds that no step has used."""
        return sum(each.num_batches for each in self.rounds)

    def use(self) -> None:
        """Notes that a step uses the oldest round."""
        self._used.append(self.rounds.popleft())
        self.num_used += 1

    def put_back(self) -> None:
        """Frees the samples of all rounds that no step has used."""
        for each in reversed(self.rounds):
            for rank in reversed(self.members):
                self._release(each.shares[rank])
        self.rounds.clear()

    def lose(self, ranks: Set[int], num_used: Mapping[int, int] | None = None) -> None:
        """Removes members; what they had not used is the next that divide() gives to the others.

        Args:
            ranks: Their ranks.
            num_used: How many rounds a member had used, if it is known; otherwise as many as this one.
        """
        known, had_samples = num_used or {}, self.has_samples
        self.members = [rank for rank in self.members if rank not in ranks]
        for number, each in self._numbered():
            for rank in sorted(each.shares.keys() & ranks, reverse=True):
                if number >= known.get(rank, self.num_used):
                    self._release(each.shares.pop(rank))
        self._is_reopened |= not self.rounds and not had_samples and self.has_samples

    def _numbered(self) -> Iterator[tuple[int, Round]]:
        """The newest rounds with their numbers, the last one first: those that no step has used, and some before."""
        newest = [*self._used, *self.rounds]
        return reversed([*enumerate(newest, start=self.num_used - len(self._used))])

    def _release(self, spans: Spans) -> None:
        for span in reversed(spans):
            (self._free if span[0] < self._num_samples else self._next_free).insert(0, span)

    def welcome(self, ranks: Iterable[int]) -> None:
        """Adds members, which get samples in all rounds that no step has used: free ones, or of the next epoch."""
        for rank in sorted(ranks):
            for each in self.rounds:
                free = self._free if self.num_free else self._next_free
                share = max(map(_count, each.shares.values()))
                each.shares[rank] = _take(free, min(share, _count(free)))
            self.members = sorted([*self.members, rank])
            self.since[rank] = self.num_used

    def state(self) -> dict[str, Any]:
        """All that new members need, as JSON values."""
        rounds = [
            [[[rank, spans] for rank, spans in each.shares.items()], each.num_batches] for each in self.rounds
        ]
        since = [[rank, number] for rank, number in self.since.items()]
        members = {"members": list(self.members), "since": since, "num_used": self.num_used}
        return {**self._progress(), **members, "rounds": rounds, "is_reopened": self._is_reopened}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over state()."""
        self.load_progress(state)
        self.members = list(state["members"])
        self.since = dict(state["since"])
        self.num_used, self._is_reopened = int(state["num_used"]), bool(state["is_reopened"])
        self.rounds = deque(
            Round({rank: _spans(spans) for rank, spans in shares}, num_batches)
            for shares, num_batches in state["rounds"]
        )

    def progress(self) -> dict[str, Any]:
        """The unused samples, as JSON values; independent of the members."""
        copy = SampleDivision(self._num_samples, self._batch_size, self.members)
        copy.load(self.state())
        copy.put_back()
        return copy._progress()

    def _progress(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "free": list(self._free), "next_free": list(self._next_free)}

    def load_progress(self, state: Mapping[str, Any]) -> None:
        """Goes on from progress(), with the present members."""
        self.epoch = int(state["epoch"])
        self._free, self._next_free = _spans(state["free"]), _spans(state["next_free"])
        self.rounds.clear()
        self._used.clear()
        self._is_reopened = False


def _count(spans: Spans) -> int:
    return sum(end - first for first, end in spans)


def _spans(values: Iterable[Iterable[int]]) -> Spans:
    return [(first, end) for first, end in values]


def _divided_up(number: int, by: int) -> int:
    return -(-number // by)


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

"""SampleDivision: whoever is lost or comes, members stay equal, and no sample of an epoch is given away twice."""

from __future__ import annotations

import json
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from coarse.torch.sample_division import SampleDivision


def samples_of(spans):
    return [sample for first, end in spans for sample in range(first, end)]


class Member:
    """A worker's division, and a loader that takes rounds `depth` ahead of training."""

    def __init__(self, rank, division, depth, *, is_new=False):
        self.rank, self.division, self.depth = rank, division, depth
        self.may_divide = not is_new  # not before the first of the rounds that it was told is used
        self.taken = []  # as many as a loader has, not used yet
        self.begin_epoch()

    def begin_epoch(self):
        self.taken = []
        self.load(self.depth)

    def load(self, number):
        for _ in range(number):
            rounds = self.division.rounds
            if len(self.taken) < len(rounds) or (self.may_divide and self.division.divide()):
                self.taken.append(samples_of(rounds[len(self.taken)][self.rank]))

    def next_batch(self):
        """Takes one more round, and returns the oldest; None at the end of the epoch."""
        self.load(1)
        return self.taken[0] if self.taken else None

    def use(self):
        self.may_divide = True
        self.taken.pop(0)
        self.division.use()


class Job:
    """Members that train in steps; each may end in any of them, and newcomers come at the beginning of any."""

    def __init__(self, num_places, num_samples, batch_size, depth, chance):
        self.num_samples, self.batch_size, self.depth, self.chance = num_samples, batch_size, depth, chance
        self.num_places = num_places
        everyone = range(num_places)
        self.members = {
            rank: Member(rank, SampleDivision(num_samples, batch_size, everyone), depth) for rank in everyone
        }
        self.seen = Counter()  # (epoch, sample): how often a member has trained on it
        self.unseen = set()  # of the last batch of a lost member, which it may not have loaded
        self.rests = []  # of the ends of epochs: samples that nobody had, and members

    def step(self):
        """One step of all members; returns whether the epoch has it."""
        batches = {rank: member.next_batch() for rank, member in self.members.items()}
        if None in batches.values():
            assert not any(batches.values()), "all come to the end of an epoch at once"
            return False
        self.welcome(batches)
        doomed = [rank for rank in self.members if self.chance.random() < 0.08][: len(self.members) - 1]
        for rank, member in self.members.items():
            member.use()
            self.note(batches[rank], is_seen=rank not in doomed or self.chance.random() < 0.5)
        for rank in doomed:
            del self.members[rank]
        for member in self.members.values():
            member.division.lose(set(doomed))
        self.check_equal()
        return True

    def welcome(self, batches):
        """Lets newcomers take part in the step whose batches the others have."""
        newcomers = [
            rank for rank in range(self.num_places) if rank not in self.members and self.chance.random() < 0.2
        ]
        if not newcomers:
            return
        for member in self.members.values():
            member.division.welcome(newcomers)
        told = json.dumps(next(iter(self.members.values())).division.state())
        for rank in newcomers:
            division = SampleDivision(self.num_samples, self.batch_size, range(self.num_places))
            division.load(json.loads(told))
            self.members[rank] = Member(rank, division, self.depth, is_new=True)
            batches[rank] = self.members[rank].next_batch()
            assert batches[rank], "a newcomer has samples for the step in which it begins"

    def note(self, batch, *, is_seen):
        epoch = next(iter(self.members.values())).division.epoch
        for sample in batch:
            later, number = divmod(sample, self.num_samples)
            if not is_seen:
                self.unseen.add((epoch + later, number))
            self.seen[epoch + later, number] += is_seen

    def check_equal(self):
        states = [json.dumps(member.division.state()) for member in self.members.values()]
        assert len(set(states)) == 1

    def next_epoch(self):
        self.rests.append((next(iter(self.members.values())).division.num_free, len(self.members)))
        for member in self.members.values():
            member.division.begin_epoch(member.division.epoch + 1)
            member.begin_epoch()


@given(
    num_places=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    depth=st.integers(0, 4),
    rounds=st.integers(4, 30),
    rest=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_each_sample_is_given_away_once_and_all_but_a_few_are(
    num_places, batch_size, depth, rounds, rest, seed
):
    num_samples = num_places * batch_size * (depth + rounds) + rest
    job = Job(num_places, num_samples, batch_size, depth, random.Random(seed))
    for _ in range(3):
        while job.step():
            continue
        job.next_epoch()
    assert set(job.seen.values()) <= {0, 1}, "no sample twice in an epoch"
    assert all(not job.seen[sample] for sample in job.unseen), "not even one of a batch that was lost"
    for epoch, (num_free, num_members) in enumerate(job.rests):
        num_given = sum(each == epoch for each, _ in job.seen)
        assert num_free < num_members
        assert num_given + num_free == num_samples, "all but the rest were given to somebody"


def divided(division):
    """The batches of the next round, by rank."""
    assert division.divide()
    batches = {rank: samples_of(spans) for rank, spans in division.rounds[-1].items()}
    division.use()
    return batches


def test_members_take_batches_in_turn_and_share_the_last_ones():
    division = SampleDivision(20, 4, [0, 1, 2])
    assert division.num_rounds_left == 2
    assert divided(division) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9, 10, 11]}
    assert divided(division) == {0: [12, 13, 14], 1: [15, 16, 17], 2: [18, 19]}
    assert not division.divide()


def test_a_rest_of_less_than_a_sample_for_each_is_nobodys():
    division = SampleDivision(14, 4, [0, 1, 2])
    divided(division)
    assert not division.divide()
    assert division.num_free == 2


def test_what_a_lost_member_had_loaded_in_advance_goes_to_the_others():
    division = SampleDivision(100, 2, [0, 1, 2])
    for _ in range(3):
        division.divide()
    division.use()
    division.lose({1})  # has 8, 9 and 14, 15
    assert [samples_of(each[0]) for each in division.rounds] == [[6, 7], [12, 13]]
    division.use()
    division.use()
    assert divided(division) == {0: [8, 9], 2: [14, 15]}


def test_a_newcomer_takes_part_in_the_step_that_is_under_way():
    division = SampleDivision(100, 2, [0, 2])
    division.divide()
    division.welcome([1])
    assert samples_of(division.rounds[0][1]) == [4, 5]
    division.use()
    assert divided(division) == {0: [6, 7], 1: [8, 9], 2: [10, 11]}


def test_a_newcomer_in_the_last_step_of_an_epoch_begins_with_the_next():
    division = SampleDivision(8, 2, [0, 1])
    divided(division)
    division.divide()
    division.welcome([2])
    assert samples_of(division.rounds[0][2]) == [8, 9], "0 and 1 of the next epoch"
    division.use()
    assert not division.divide()
    division.begin_epoch(1)
    assert divided(division) == {0: [2, 3], 1: [4, 5], 2: [6, 7]}


def test_progress_leaves_out_what_steps_have_used_and_fits_any_members():
    division = SampleDivision(12, 2, [0, 1])
    for _ in range(2):
        division.divide()
    division.use()
    restarted = SampleDivision(12, 2, [0, 1, 2])
    restarted.load_progress(json.loads(json.dumps(division.progress())))
    assert divided(restarted) == {0: [4, 5], 1: [6, 7], 2: [8, 9]}
    assert len(division.rounds) == 1, "the division itself stays as it was"


def test_another_epoch_than_the_next_has_all_samples():
    division = SampleDivision(8, 2, [0, 1])
    division.divide()
    division.welcome([2])
    division.begin_epoch(5)
    assert division.num_free == 8

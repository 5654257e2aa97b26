"""SampleDivision: whoever is lost or comes, members stay equal, and no sample of an epoch is given away twice."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.torch.sample_division import SampleDivision


def samples_of(spans):
    return [sample for first, end in spans for sample in range(first, end)]


class Member:
    """A worker's division, and a loader that takes batches `depth` ahead of training."""

    def __init__(self, rank, division, depth, *, is_new=False):
        self.rank, self.division, self.depth = rank, division, depth
        self.may_divide = not is_new  # not before the first of the batches that it was told is used
        self.begin_epoch()

    def begin_epoch(self):
        self.taken = []  # batches of the rounds that are not used
        self.load(self.depth)

    def load(self, number):
        for _ in range(number):
            place = len(self.taken)
            spans = self.division.batch(self.rank, place)
            if spans is None and self.may_divide and self.division.divide():
                spans = self.division.batch(self.rank, place)
            if spans is not None:
                self.taken.append(samples_of(spans))

    def first_batch(self):
        """Takes one more batch, and returns the oldest; None at the end of the epoch."""
        self.load(1)
        return self.taken[0] if self.taken else None

    def train(self):
        """Uses the oldest round, of which the first batch is there; returns its batches and their weights."""
        self.may_divide = True
        number = self.division.rounds[0].num_batches
        self.load(number - 1)
        batches, self.taken = self.taken[:number], self.taken[number:]
        weights = [self.division.rounds[0].weight(self.rank, place) for place in range(number)]
        self.division.use()
        return [*zip(batches, weights, strict=True)]


class Job:
    """Members that train in steps; in any of them, each may end or leave, and newcomers may come."""

    def __init__(self, num_places, num_samples, batch_size, global_batch_size, depth, chance):
        self.num_samples, self.batch_size, self.global_batch_size = num_samples, batch_size, global_batch_size
        self.num_places, self.depth, self.chance = num_places, depth, chance
        self.members = {
            rank: Member(rank, self.division(range(num_places)), depth) for rank in range(num_places)
        }
        self.seen = Counter()  # (epoch, sample): how often a member has trained on it
        self.unseen = set()  # of the last step of a lost member, which it may not have loaded
        self.rests = []  # of the ends of epochs: samples that nobody had, and members

    def division(self, members):
        return SampleDivision(self.num_samples, self.batch_size, members, self.global_batch_size)

    def step(self):
        """One step of all members; returns whether the epoch has it."""
        batches = {rank: member.first_batch() for rank, member in self.members.items()}
        if None in batches.values():
            assert not any(batches.values()), "all come to the end of an epoch at once"
            return False
        leavers = {rank: self.members.pop(rank) for rank in self.drawn(0.05)}
        self.welcome(without=leavers)
        doomed = self.drawn(0.08)
        trained = {rank: member.train() for rank, member in self.members.items()}
        self.check_weights(trained.values())
        for rank, parts in trained.items():
            is_seen = rank not in doomed or self.chance.random() < 0.5
            self.note([sample for batch, weight in parts if weight for sample in batch], is_seen=is_seen)
        for rank in doomed:
            del self.members[rank]
        used = {rank: leaver.division.num_used for rank, leaver in leavers.items()}
        for member in self.members.values():
            member.division.lose({*doomed, *leavers}, used)
        self.check_equal()
        return True

    def drawn(self, probability):
        """Some members, but not all."""
        return [rank for rank in self.members if self.chance.random() < probability][: len(self.members) - 1]

    def welcome(self, *, without):
        """Lets newcomers take part in the step whose first batches the others have."""
        vacant = [rank for rank in range(self.num_places) if rank not in self.members and rank not in without]
        newcomers = [rank for rank in vacant if self.chance.random() < 0.2]
        if not newcomers:
            return
        for member in self.members.values():
            member.division.welcome(newcomers)
        told = json.dumps(next(iter(self.members.values())).division.state())
        for rank in newcomers:
            division = self.division(range(self.num_places))
            division.load(json.loads(told))
            self.members[rank] = Member(rank, division, self.depth, is_new=True)
            assert self.members[rank].first_batch(), "a newcomer has samples for the step in which it begins"

    def check_weights(self, trained):
        """Those of a step are as the sizes of the batches, and their mean over all contributors is 1."""
        batches = [part for parts in trained for part in parts]
        assert all(len(batch) <= self.batch_size for batch, _ in batches)
        per_sample = [weight / len(batch) for batch, weight in batches if weight]
        assert per_sample == pytest.approx([per_sample[0]] * len(per_sample))

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
    more_than_places=st.none() | st.integers(0, 30),
    depth=st.integers(0, 4),
    rounds=st.integers(4, 20),
    rest=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_each_sample_is_given_away_once_and_all_but_a_few_are(
    num_places, batch_size, more_than_places, depth, rounds, rest, seed
):
    global_batch_size = 0 if more_than_places is None else num_places + more_than_places
    # Newcomers may each take a whole global batch for each round that a single other member has loaded.
    num_samples = num_places * (global_batch_size or batch_size) * (depth + rounds) + rest
    job = Job(num_places, num_samples, batch_size, global_batch_size, depth, random.Random(seed))
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
    """The shares of the next round, by rank."""
    assert division.divide()
    shares = {rank: samples_of(spans) for rank, spans in division.rounds[-1].shares.items()}
    division.use()
    return shares


def batches_of(division, rank):
    """A member's batches of the rounds that are not used."""
    batches = []
    while (spans := division.batch(rank, len(batches))) is not None:
        batches.append(samples_of(spans))
    return batches


def weights_of(division):
    """Those of the oldest round, by rank."""
    oldest = division.rounds[0]
    return {
        rank: [oldest.weight(rank, number) for number in range(oldest.num_batches)] for rank in oldest.shares
    }


def test_members_take_batches_in_turn_and_share_the_last_ones():
    division = SampleDivision(20, 4, [0, 1, 2])
    assert division.num_batches_left == 2
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
    assert [samples_of(each.shares[0]) for each in division.rounds] == [[6, 7], [12, 13]]
    division.use()
    division.use()
    assert divided(division) == {0: [8, 9], 2: [14, 15]}


def test_a_newcomer_takes_part_in_the_step_that_is_under_way():
    division = SampleDivision(100, 2, [0, 2])
    division.divide()
    division.welcome([1])
    assert samples_of(division.rounds[0].shares[1]) == [4, 5]
    division.use()
    assert divided(division) == {0: [6, 7], 1: [8, 9], 2: [10, 11]}


def test_a_newcomer_in_the_last_step_of_an_epoch_begins_with_the_next():
    division = SampleDivision(8, 2, [0, 1])
    divided(division)
    division.divide()
    division.welcome([2])
    assert samples_of(division.rounds[0].shares[2]) == [8, 9], "0 and 1 of the next epoch"
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


# ---- a global batch ----


def test_a_global_batch_is_divided_with_its_remainder():
    division = SampleDivision(26, 8, [0, 1, 2], 13)
    assert division.num_batches_left == 2
    division.divide()
    assert weights_of(division) == {0: [3 * 5 / 13], 1: [3 * 4 / 13], 2: [3 * 4 / 13]}
    assert divided(division) == {0: [13, 14, 15, 16, 17], 1: [18, 19, 20, 21], 2: [22, 23, 24, 25]}


def test_members_with_more_than_a_batch_take_several_as_many_as_all_others():
    division = SampleDivision(100, 3, [0, 1], 9)
    division.divide()
    assert division.num_batches == 2
    assert batches_of(division, 0) == [[0, 1, 2], [3, 4]]
    assert batches_of(division, 1) == [[5, 6], [7, 8]]
    assert weights_of(division) == {0: [2 * 3 / 9, 2 * 2 / 9], 1: [2 * 2 / 9] * 2}


def test_fewer_members_take_more_batches_of_the_same_global_batch():
    division = SampleDivision(120, 4, [0, 1, 2], 12)
    assert division.num_batches_left == 10
    division.divide()
    assert division.num_batches == 1
    division.use()
    division.lose({1})
    assert {rank: len(share) for rank, share in divided(division).items()} == {0: 6, 2: 6}
    division.divide()
    assert batches_of(division, 2) == [[30, 31, 32], [33, 34, 35]]
    assert division.num_batches_left == 2 * 7


def test_rounds_that_were_divided_before_a_loss_keep_their_batches():
    division = SampleDivision(100, 4, [0, 1, 2], 13)
    division.divide()
    assert division.num_batches == 2
    division.lose({0})
    assert division.num_batches == 2
    assert weights_of(division) == {1: [2 * 2 / 8] * 2, 2: [2 * 2 / 8] * 2}


def test_a_member_with_fewer_samples_than_batches_repeats_one_that_does_not_count():
    division = SampleDivision(100, 1, [0, 1, 2], 4)
    division.divide()
    assert [batches_of(division, rank) for rank in range(3)] == [[[0], [1]], [[2], [2]], [[3], [3]]]
    assert weights_of(division) == {0: [0.75, 0.75], 1: [0.75, 0.0], 2: [0.75, 0.0]}


def test_a_newcomer_takes_as_many_batches_as_the_others():
    division = SampleDivision(100, 3, [0, 2], 9)
    division.divide()
    division.welcome([1])
    assert batches_of(division, 1) == [[9, 10, 11], [12, 13]]
    assert sum(map(sum, weights_of(division).values())) == pytest.approx(3)


def test_the_last_global_batch_of_an_epoch_is_what_is_left():
    division = SampleDivision(12, 3, [0, 1], 9)
    divided(division)
    assert division.num_batches_left == 1
    division.divide()
    assert weights_of(division) == {0: [2 * 2 / 3], 1: [2 * 1 / 3]}


# ---- members that leave as planned ----


def test_the_share_of_a_member_that_has_left_before_a_step_goes_to_the_others():
    division = SampleDivision(100, 2, [0, 1, 2])
    divided(division)
    division.divide()
    division.divide()
    division.use()  # without member 1, which has used one round only
    division.lose({1}, {1: 1})
    division.use()
    assert divided(division) == {0: [8, 9], 2: [14, 15]}


def test_a_lost_member_may_have_used_the_round_that_all_others_have_used():
    division = SampleDivision(100, 2, [0, 1])
    divided(division)
    division.lose({1})
    assert divided(division) == {0: [4, 5]}


def test_an_epoch_goes_on_once_if_a_member_leaves_in_its_last_step():
    division = SampleDivision(8, 2, [0, 1])
    divided(division)
    divided(division)
    assert not division.reopens()
    division.lose({1}, {1: 1})
    assert division.reopens()
    assert not division.reopens()
    assert divided(division) == {0: [6, 7]}


def test_an_epoch_whose_rounds_are_not_all_used_does_not_begin_again():
    division = SampleDivision(12, 2, [0, 1])
    divided(division)
    division.divide()
    division.lose({1}, {1: 1})
    assert not division.reopens()

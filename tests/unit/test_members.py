"""Members: callbacks are told the old and the new world, once for each change."""

from __future__ import annotations

import pytest

from coarse.client.membership.members import Members, WorldChange


@pytest.fixture
def members():
    return Members([2, 0, 1])


@pytest.fixture
def changes(members):
    told = []
    members.on_change(told.append)
    return told


def test_a_change_tells_both_worlds_and_who_left(members, changes):
    members.remove({1})
    assert members.ranks == (0, 2)
    assert changes == [WorldChange(old=(0, 1, 2), new=(0, 2))]
    assert (changes[0].left, changes[0].joined) == ({1}, frozenset())


def test_a_change_tells_who_joined(members, changes):
    members.remove({0, 1})
    members.welcome(frozenset({0, 3}))
    assert changes[1] == WorldChange(old=(2,), new=(0, 2, 3))
    assert (changes[1].left, changes[1].joined) == (frozenset(), {0, 3})


def test_the_members_are_the_new_ones_when_callbacks_run(members):
    seen = []
    members.on_change(lambda change: seen.append(members.ranks == change.new))
    members.remove({2})
    assert seen == [True]


def test_a_loss_that_was_told_is_not_told_again(members, changes):
    members.remove({1})
    members.remove({1})
    members.remove(set())
    assert len(changes) == 1


def test_a_newcomer_is_not_told_of_its_own_entry(members, changes):
    members.begin((3, 0))
    assert members.ranks == (0, 3)
    members.remove({0})
    assert changes == [WorldChange(old=(0, 3), new=(3,))]


def test_a_worker_in_the_place_of_one_just_lost_is_a_newcomer_in_the_same_world(members, changes):
    newcomers = []
    members.on_newcomers(newcomers.append)
    members.welcome(frozenset({1}))
    assert newcomers == [{1}]
    assert changes == []

"""The AllReduce of `coarse bench replay` takes the way that is measured as the fastest for each size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.bench.replay.allreduce_tuner import (
    FAR,
    describe_ways,
    fastest_ways,
    size_class,
    ways_of_shards,
    ways_to_repeat,
)


def test_of_the_repeats_the_fastest_counts():
    assert fastest_ways({4: {"ring": [5.0, 9.0], "tree": [9.0, 2.5]}, 8: {"ring": [1.0, 2.0]}}) == {
        4: "tree",
        8: "ring",
    }


def test_ties_go_to_the_way_that_is_named_first():
    assert fastest_ways({4: {"ring": [1.0], "tree": [1.0]}}) == {4: "ring"}


@pytest.mark.parametrize(
    ("seconds", "ways"),
    [
        ({"ring": [], "tree": []}, ["ring", "tree"]),
        ({"ring": [1.0], "tree": [9.0]}, ["ring", "tree"]),
        (
            {"ring": [1.0, 1.1], "tree": [FAR, 9.0], "all-gather": [FAR + 0.01, 9.0]},
            ["ring", "tree"],
        ),
        ({"ring": [9.0, 1.2], "tree": [1.0, 9.0]}, ["ring", "tree"]),
        ({"ring": [1.0, 1.0], "tree": [2.0, 2.0]}, []),
    ],
)
def test_only_ways_that_may_be_the_fastest_are_repeated(seconds, ways):
    assert ways_to_repeat(seconds) == ways


@given(st.dictionaries(st.text(), st.lists(st.floats(1e-6, 1e3), min_size=2), min_size=2))
def test_the_fastest_way_is_repeated_unless_it_is_alone(seconds):
    repeated = ways_to_repeat(seconds)
    assert len(repeated) != 1
    assert not repeated or fastest_ways({4: seconds})[4] in repeated


@given(st.integers(1, 1 << 40))
def test_a_size_is_measured_at_most_twice_as_large(nbytes):
    assert nbytes <= size_class(nbytes) < max(2 * nbytes, 5)


def test_a_shard_takes_the_way_of_its_size_class():
    assert ways_of_shards([8, 1000, 4096], {8: "tree", 1024: "tree", 4096: "ring"}) == {
        0: "tree",
        1: "tree",
        2: "ring",
    }


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        ({8: "tree", 1024: "tree", 4096: "ring"}, "tree up to 1 KiB, ring up to 4 KiB"),
        ({8: "ring"}, "ring up to 8 B"),
        ({}, ""),
    ],
)
def test_a_choice_is_told_by_ranges_of_sizes(ways, words):
    assert describe_ways(ways) == words

"""The AllReduce of `coarse bench replay` takes the way that is measured as the fastest for each size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.bench.replay.allreduce_tuner import describe_ways, fastest_ways, size_class


def test_the_slowest_worker_counts_and_of_the_repeats_the_fastest():
    one = {"ring": {4: [1.0, 9.0], 8: [1.0, 1.0]}, "tree": {4: [3.0, 2.0], 8: [3.0, 3.0]}}
    other = {"ring": {4: [5.0, 9.0], 8: [1.0, 2.0]}, "tree": {4: [3.0, 2.5], 8: [3.0, 3.0]}}
    assert fastest_ways([one, other]) == {4: "tree", 8: "ring"}


def test_ties_go_to_the_way_that_is_named_first():
    assert fastest_ways([{"ring": {4: [1.0]}, "tree": {4: [1.0]}}]) == {4: "ring"}


@given(st.integers(1, 1 << 40))
def test_a_size_is_measured_at_most_twice_as_large(nbytes):
    assert nbytes <= size_class(nbytes) < max(2 * nbytes, 5)


@pytest.mark.parametrize(
    ("sizes", "ways", "words"),
    [
        ([8, 1000, 4096], {0: "tree", 1: "tree", 2: "ring"}, "tree up to 1 KiB, ring up to 4 KiB"),
        ([8], {0: "ring"}, "ring up to 8 B"),
        ([8], {}, ""),
    ],
)
def test_a_choice_is_told_by_ranges_of_sizes(sizes, ways, words):
    assert describe_ways(sizes, ways) == words

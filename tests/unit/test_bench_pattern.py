"""Contributions of a benchmark's verification: every wrong element and every missing contributor is detected."""

from __future__ import annotations

import numpy as np
import pytest

from coarse.bench.sync import pattern

NUM_ELEMENTS = 600_000  # more than two blocks, and no multiple of one


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
def test_sum_of_all_contributions_is_what_is_expected(dtype: str, num_workers: int) -> None:
    total = np.zeros(NUM_ELEMENTS, dtype)
    for rank in range(num_workers):
        part = np.empty(NUM_ELEMENTS, dtype)
        pattern.fill(part, pattern.contribution_scale(rank))
        total += part
    assert pattern.first_difference(total, pattern.reduced_scale(num_workers, mean=False)) is None


def test_mean_of_three_workers_is_within_rounding() -> None:
    total = np.zeros(NUM_ELEMENTS, "float32")
    pattern.fill(total, 7.0)
    assert pattern.first_difference(total / np.float32(3), pattern.reduced_scale(3, mean=True)) is None


@pytest.mark.parametrize("position", [0, 251, 299_999, NUM_ELEMENTS - 1])
def test_one_wrong_element_is_found_and_named(position: int) -> None:
    values = np.empty(NUM_ELEMENTS, "float32")
    pattern.fill(values, 3)
    values[position] += 1
    difference = pattern.first_difference(values, 3)
    assert difference is not None
    assert f"element {position} of {NUM_ELEMENTS}" in difference


def test_missing_contributor_is_a_difference() -> None:
    values = np.empty(NUM_ELEMENTS, "float32")
    pattern.fill(values, pattern.contribution_scale(1))
    assert pattern.first_difference(values, pattern.reduced_scale(2, mean=False)) is not None


@pytest.mark.parametrize("shift", [1, 64, 4096, 65536])
def test_piece_put_back_at_the_wrong_offset_is_a_difference(shift: int) -> None:
    values = np.empty(NUM_ELEMENTS, "float32")
    pattern.fill(values, 1)
    assert pattern.first_difference(np.roll(values, shift), 1) is not None


def test_not_a_number_is_a_difference() -> None:
    values = np.full(8, np.nan, "float32")
    assert pattern.first_difference(values, 1) is not None

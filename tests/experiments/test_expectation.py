"""Expectations: a measurement within the range and its tolerance is within, any other is lower or higher."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.expectation import (
    AIM,
    HIGHER,
    LOWER,
    OTHER,
    PREDICTED,
    WITHIN,
    CategoryCheck,
    Expectation,
    Measured,
    NumberCheck,
    check_as_json,
    check_from_json,
    judge_all,
    judge_number,
)
from experiments.paper import is_citation

NUMBERS = st.floats(-1e6, 1e6)


@st.composite
def expectations(draw):
    low, high = sorted((draw(NUMBERS), draw(NUMBERS)))
    return Expectation(low=low, high=high, tolerance=draw(st.floats(0, 1e6)), source="V-E")


@given(expectations(), NUMBERS)
def test_a_verdict_is_the_side_on_which_a_value_lies(expectation, value):
    least, most = expectation.low - expectation.tolerance, expectation.high + expectation.tolerance
    assert expectation.verdict(value) == (LOWER if value < least else HIGHER if value > most else WITHIN)


@given(expectations(), st.floats(0, 1))
def test_every_value_of_the_range_is_within_and_both_sides_can_differ(expectation, share):
    value = expectation.low + share * (expectation.high - expectation.low)
    assert expectation.verdict(min(value, expectation.high)) == WITHIN
    beyond = expectation.tolerance + 1 + 1e-9 * abs(expectation.low) + 1e-9 * abs(expectation.high)
    assert expectation.verdict(expectation.low - beyond) == LOWER
    assert expectation.verdict(expectation.high + beyond) == HIGHER


@given(expectations(), NUMBERS, NUMBERS)
def test_a_larger_value_never_has_a_lower_verdict(expectation, one, other):
    order = [LOWER, WITHIN, HIGHER]
    small, large = sorted((one, other))
    assert order.index(expectation.verdict(small)) <= order.index(expectation.verdict(large))


@given(expectations(), st.lists(NUMBERS, min_size=1, max_size=5))
def test_one_place_outside_is_enough(expectation, values):
    check = judge_all(expectation, values)
    assert (check.verdict == WITHIN) == all(expectation.verdict(value) == WITHIN for value in values)
    assert (check.measured.low, check.measured.high) == (min(values), max(values))


@given(st.lists(NUMBERS, min_size=1))
def test_the_median_lies_within_its_spread(values):
    measured = Measured.median_of(values)
    assert measured.low <= measured.value <= measured.high


def test_the_papers_range_is_met_within_it_and_its_tolerance_alone():
    less = Expectation(low=20, high=42, tolerance=2, unit="% less", source="V-E")
    assert [less.verdict(value) for value in (17.9, 18, 30, 44, 44.1)] == [
        LOWER,
        WITHIN,
        WITHIN,
        WITHIN,
        HIGHER,
    ]
    speed = Expectation(low=1.483, high=1.483, tolerance=0.1, source="V-D, Fig 16e")
    assert [speed.verdict(value) for value in (1.28, 1.483, 1.9)] == [LOWER, WITHIN, HIGHER]


def test_nan_is_never_within():
    assert Expectation(low=0, high=1, source="V-E").verdict(math.nan) == LOWER
    with pytest.raises(ValueError, match="nan is not from"):
        Measured.exactly(math.nan)


@pytest.mark.parametrize(
    "changes",
    [
        {"low": 3},
        {"low": -math.inf},
        {"high": math.inf},
        {"high": math.nan},
        {"tolerance": -1},
        {"tolerance": math.inf},
    ],
)
def test_an_expectation_that_every_value_or_none_meets_is_refused(changes):
    with pytest.raises(ValueError, match="is no range with a tolerance"):
        Expectation(**{"low": 1.0, "high": 2.0, "source": "V-E", **changes})


@pytest.mark.parametrize("source", ["", "VIII", "III-G", "Fig 18", "Fig 8c", "V-E,Fig 17", "Fig"])
def test_a_source_that_the_paper_does_not_have_is_refused(source):
    with pytest.raises(ValueError, match="the paper has no"):
        Expectation(low=1, high=2, source=source)
    with pytest.raises(ValueError, match="the paper has no"):
        CategoryCheck(category="a", categories=("a",), source=source)


@pytest.mark.parametrize("source", ["V-E", "III-E, Fig 14", "Fig 16e", "Table I", PREDICTED, AIM])
def test_the_papers_sections_figures_and_panels_are_sources(source):
    assert Expectation(low=1, high=2, source=source).source == source


def test_every_name_of_a_panel_is_a_citation():
    assert all(map(is_citation, ("Fig 8a", "Fig 8b", "Fig 16a", "Fig 16f")))
    assert not any(map(is_citation, ("Fig 9a", "Fig 16g", "Figure 9", "IV-D")))


@pytest.mark.parametrize(
    ("categories", "verdict"), [(("a", "a"), WITHIN), (("a", "b"), OTHER), (("b",), OTHER), ((), OTHER)]
)
def test_every_place_has_to_be_of_the_category(categories, verdict):
    check = CategoryCheck(category="a", categories=categories, source="V-C")
    assert check.verdict == verdict


def test_checks_read_well():
    expectation = Expectation(what="local", low=9, high=9, tolerance=0.9, unit=" GB/s", source="Fig 8")
    check = NumberCheck(expectation=expectation, measured=Measured(value=8.5, low=8.4, high=9))
    assert check.expected == "local 9 ± 0.9 GB/s (Fig 8)"
    assert check.found == "local 8.5 (8.4 to 9) GB/s"
    assert str(Expectation(low=-42, high=-20, tolerance=5, unit="%", source="V-E")) == "-42 to -20 ± 5% (V-E)"
    assert CategoryCheck(category="a", categories=("b", "c", "b"), source="V-C").found == "b, c"


def test_checks_come_back_from_json_and_are_judged_anew():
    checks = [
        judge_number(Expectation(low=1, high=2, source="V-E"), 3),
        CategoryCheck(category="a", categories=("a", "b"), source="V-C"),
    ]
    for check in checks:
        written = json.loads(json.dumps(check_as_json(check)))
        assert written["verdict"] != WITHIN
        assert check_from_json({**written, "verdict": WITHIN}) == check


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        (Measured(value=1.1e-14, low=0, high=2), "0 (0 to 2)"),
        (Measured.exactly(-1e-15), "0"),
        (Measured(value=1234.5, low=0.00123, high=2000), "1.23e+03 (0.00123 to 2e+03)"),
    ],
)
def test_measured_values_are_printed_with_three_digits_and_rounding_errors_as_zero(measured, text):
    assert str(measured) == text

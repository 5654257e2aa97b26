"""Membership changes (docs/design/membership.md), model-checked within small bounds; `make model` goes further.

That a search finds nothing says little if it could find nothing: so each planted mistake must be found.
"""

from __future__ import annotations

import pytest
from membership_model import MISSING, MISTAKES, QUICK, WITNESSES, Bounds, Checker

pytestmark = pytest.mark.skipif(bool(MISSING), reason="needs Spin and a C compiler: apt install spin gcc")


@pytest.fixture
def checker():
    with Checker() as checker:
        yield checker


@pytest.mark.parametrize("bounds", QUICK, ids=str)
def test_every_state_within_the_bounds_is_in_order(checker, bounds):
    assert checker.check(bounds).error == ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(checker, mistake):
    assert checker.check(MISTAKES[mistake], f"MISTAKE_{mistake}").error != ""


@pytest.mark.parametrize("witness", WITNESSES)
def test_the_model_reaches_what_it_is_about(checker, witness):
    assert "assertion violated" in checker.check(WITNESSES[witness], f"WITNESS_{witness}").error


def test_no_run_goes_on_for_ever(checker):
    assert checker.check(Bounds(steps=1, deaths=1), finds_cycles=True).error == ""

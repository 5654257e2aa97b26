"""Studies: figures that agree, and figures that do not."""

from __future__ import annotations

import math

import pytest

from coarse.simulator.studies.catalogue import load_study
from coarse.simulator.studies.study import Basis, Claim, Comparison, StudyResult


def comparison(document, simulated, basis=Basis.PREDICTED):
    return Comparison(what="step", document=document, simulated=simulated, source="Table 1", basis=basis)


@pytest.mark.parametrize(
    ("simulated", "basis", "agrees"),
    [
        (114.0, Basis.PREDICTED, True),
        (86.0, Basis.FITTED, True),
        (116.0, Basis.PREDICTED, False),
        (84.0, Basis.FITTED, False),
        (100.5, Basis.EXACT, True),
        (101.0, Basis.EXACT, False),
    ],
)
def test_a_figure_agrees_within_its_tolerance_on_both_sides(simulated, basis, agrees):
    assert comparison(100.0, simulated, basis).agrees == agrees


def test_nothing_is_compared_with_nothing():
    assert comparison(0.0, 0.0, Basis.EXACT).agrees
    assert not comparison(0.0, 1.0, Basis.EXACT).agrees
    with pytest.raises(ValueError, match="relative to 0"):
        comparison(0.0, 1.0)
    with pytest.raises(ValueError, match="cannot be compared"):
        comparison(1.0, math.nan)


def test_deviations_are_what_neither_agrees_nor_holds():
    off, false = comparison(1.0, 2.0), Claim(what="grows", source="Fig 1", holds=False, found="falls")
    true = Claim(what="falls", source="Fig 1", holds=True, found="falls")
    result = StudyResult(comparisons=[comparison(1.0, 1.0), off], claims=[true, false])
    assert list(result.deviations()) == [off, false]


def test_an_unknown_study_is_named():
    with pytest.raises(ValueError, match="no study 'mgc'"):
        load_study("mgc")

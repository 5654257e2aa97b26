"""`python -m experiments --compare`: a value that leaves the spread printed beside it has moved."""

from __future__ import annotations

import json

import pytest

from experiments.__main__ import main
from experiments.common import Finding
from experiments.expectation import CategoryCheck, Expectation, Measured, NumberCheck

EXPECTATION = Expectation(low=0, high=100, source="V-E")


def number(value, low=None, high=None):
    measured = Measured(value=value, low=value if low is None else low, high=value if high is None else high)
    return NumberCheck(expectation=EXPECTATION, measured=measured)


def category(name):
    return CategoryCheck(category="always local", categories=(name,), source="V-C")


@pytest.fixture
def compare(tmp_path, capsys):
    """Compares two runs, each given as checks by row; returns the exit code and what was printed."""

    def compare(first, second, *, name="fig99"):
        for folder, rows in (("first", first), ("second", second)):
            (tmp_path / folder / name).mkdir(parents=True)
            findings = [
                Finding(ran=ran, checks=checks, note="n", kind="emulated") for ran, checks in rows.items()
            ]
            document = {"experiment": name, "findings": [each.as_json() for each in findings]}
            (tmp_path / folder / name / "results.json").write_text(json.dumps(document))
        code = main(["--compare", str(tmp_path / "first"), str(tmp_path / "second")])
        return code, capsys.readouterr().out

    return compare


@pytest.mark.parametrize(
    ("first", "second", "has_moved"),
    [
        (number(10, 9, 11), number(10.9), False),
        (number(10.9), number(10, 9, 11), False),
        (number(10, 9, 11), number(11.2), True),
        (number(10, 9, 11), number(11.2, 9.5, 12), False),
        (number(15.94), number(15.96), False),
        (number(15.9), number(16.1), True),
        (number(0.0), number(0.0), False),
        (number(32), number(31), True),
        (number(-1.15, -19.3, 1.19), number(-3), False),
        (category("always local"), category("always local"), False),
        (category("always local"), category("always remote"), True),
        (category("always local"), number(3), True),
    ],
)
def test_a_value_has_moved_if_each_lies_outside_of_the_others_spread(compare, first, second, has_moved):
    code, printed = compare({"a row": (first,)}, {"a row": (second,)})
    assert code == has_moved
    line = f"MOVED: fig99: a row: {first.found}, then {second.found}\n"
    assert (line in printed) == has_moved


def test_a_row_that_one_run_lacks_is_told(compare):
    code, printed = compare({"a row": (number(1),)}, {"a row": (number(1),), "another": (number(2),)})
    assert code == 1
    assert "fig99: another: 2 in one run alone" in printed


def test_an_experiment_that_was_refused_has_not_moved(compare, tmp_path):
    for name in ("fig99", "refused"):
        (tmp_path / "third" / name).mkdir(parents=True)
        document = {"experiment": name, "findings": []}
        (tmp_path / "third" / name / "results.json").write_text(json.dumps(document))
    compare({}, {})
    assert main(["--compare", str(tmp_path / "first"), str(tmp_path / "third")]) == 0


def test_the_committed_folders_of_experiments_are_compared_too(tmp_path, capsys):
    for folder in ("first", "second"):
        results = tmp_path / folder / "fig99" / "results"
        results.mkdir(parents=True)
        (results / "results.json").write_text(json.dumps({"experiment": "fig99", "findings": []}))
    assert main(["--compare", str(tmp_path / "first"), str(tmp_path / "second")]) == 0
    assert "1 experiments compared, 0 values moved" in capsys.readouterr().out


def test_folders_without_a_common_experiment_are_an_error(tmp_path, capsys):
    assert main(["--compare", str(tmp_path), str(tmp_path / "none")]) == 2
    assert "have no results of the same experiment" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"findings": [{"ran": "a row"}]}'])
def test_a_damaged_file_is_named(tmp_path, capsys, text):
    for folder in ("first", "second"):
        (tmp_path / folder / "fig99").mkdir(parents=True)
        (tmp_path / folder / "fig99" / "results.json").write_text(text)
    assert main(["--compare", str(tmp_path / "first"), str(tmp_path / "second")]) == 2
    assert f"not results of an experiment: {tmp_path}/first/fig99/results.json: " in capsys.readouterr().err

"""Compares the results of two runs: no value may move by more than the spread that is printed beside it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from experiments.expectation import CategoryCheck, Check, Measured, check_from_json

Checks = Mapping[tuple[str, int], Check]
"""Every check of an experiment, by its row and its place there."""


def compare_folders(first: Path, second: Path) -> int:
    """Prints each value that has moved, and what only one of the folders has.

    Args:
        first, second: Folders that hold a results.json for each experiment, as `--results` writes them.

    Returns:
        0 if all values of both folders are the same within their spread; 1 if one moved; 2 if there is nothing to
        compare, or a file is damaged. Results that one folder lacks were refused there, which is no value that moved.
    """
    names = sorted(set(_experiments(first)) & set(_experiments(second)))
    for lacking, other in ((first, second), (second, first)):
        for name in sorted(set(_experiments(other)) - set(names)):
            print(f"{name}: no results in {lacking}: refused there, or not run")
    if not names:
        print(f"{first} and {second} have no results of the same experiment", file=sys.stderr)
        return 2
    try:
        pairs = {name: (_checks(first, name), _checks(second, name)) for name in names}
    except ValueError as error:
        print(f"not results of an experiment: {error}", file=sys.stderr)
        return 2
    moved = [f"{name}: {line}" for name, pair in pairs.items() for line in differences(*pair)]
    for line in moved:
        print(f"MOVED: {line}")
    print(f"{len(names)} experiments compared, {len(moved)} values moved by more than their spread")
    return 1 if moved else 0


def differences(first: Checks, second: Checks) -> Iterator[str]:
    """A line for each check that moved, and for each that only one run has."""
    for key in dict.fromkeys((*first, *second)):
        if key not in first or key not in second:
            yield f"{key[0]}: {(first.get(key) or second[key]).found} in one run alone"
        elif has_moved(first[key], second[key]):
            yield f"{key[0]}: {first[key].found}, then {second[key].found}"


def has_moved(first: Check, second: Check) -> bool:
    """Whether each value lies outside of the other's spread, or a category changed."""
    if isinstance(first, CategoryCheck) or isinstance(second, CategoryCheck):
        return first.found != second.found
    return not (_holds(first.measured, second.measured) or _holds(second.measured, first.measured))


def _holds(spread: Measured, value: Measured) -> bool:
    """Whether a value lies in another's spread, or beside it by no more than its last printed digit."""
    unit = last_digit(value.value)
    return spread.low - unit <= value.value <= spread.high + unit


def last_digit(number: float) -> float:
    """The weight of the last of the three digits with which a number is printed."""
    return 10.0 ** (math.floor(math.log10(abs(number))) - 2) if number else 0.0


def _experiments(folder: Path) -> list[str]:
    """Names of the experiments with results, below the folder or in their `results` folders below it."""
    return [path.parent.name for path in folder.glob("*/results.json")] or [
        path.parents[1].name for path in folder.glob("*/results/results.json")
    ]


def _checks(folder: Path, name: str) -> Checks:
    """The checks of an experiment's results.

    Raises:
        ValueError: If the file is damaged; names it.
    """
    file = folder / name / "results.json"
    if not file.exists():
        file = folder / name / "results" / "results.json"
    try:
        findings = json.loads(file.read_text(encoding="utf-8"))["findings"]
        return {
            (finding["ran"], number): check_from_json(check)
            for finding in findings
            for number, check in enumerate(finding["checks"])
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: {error!r}") from None

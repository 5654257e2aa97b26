"""Compares the results of two runs: no value may move by more than the spread that is printed beside it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.expectation import CategoryCheck, Check, Measured, check_from_json


def compare_folders(first: Path, second: Path) -> int:
    """Prints each value that has moved, and what only one of the folders has.

    Args:
        first, second: Folders that hold a results.json for each experiment, as `--results` writes them.

    Returns:
        0 if all values of both folders are the same within their spread; 1 if one moved; 2 if there is nothing to
        compare. Results that one folder lacks were refused there, which is no value that moved.
    """
    names = sorted(set(_experiments(first)) & set(_experiments(second)))
    for lacking, other in ((first, second), (second, first)):
        for name in sorted(set(_experiments(other)) - set(names)):
            print(f"{name}: no results in {lacking}: refused there, or not run")
    if not names:
        print(f"{first} and {second} have no results of the same experiment", file=sys.stderr)
        return 2
    moved = [line for name in names for line in differences(_load(first, name), _load(second, name))]
    for line in moved:
        print(f"MOVED: {line}")
    print(f"{len(names)} experiments compared, {len(moved)} values moved by more than their spread")
    return 1 if moved else 0


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """A line for each check of two results.json that moved, and for each that only one of them has."""
    name = first["experiment"]
    one, other = (dict(_checks(document["findings"])) for document in (first, second))
    for key in dict.fromkeys((*one, *other)):
        where = f"{name}: {key[0]}"
        if key not in one or key not in other:
            yield f"{where}: {(one.get(key) or other[key]).found} in one run alone"
        elif has_moved(one[key], other[key]):
            yield f"{where}: {one[key].found}, then {other[key].found}"


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


def _checks(findings: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, int], Check]]:
    """Every check, by its row and its place there."""
    for finding in findings:
        for number, check in enumerate(finding["checks"]):
            yield (finding["ran"], number), check_from_json(check)


def _experiments(folder: Path) -> list[str]:
    """Names of the experiments with results, below the folder or in their `results` folders below it."""
    return [path.parent.name for path in folder.glob("*/results.json")] or [
        path.parents[1].name for path in folder.glob("*/results/results.json")
    ]


def _load(folder: Path, name: str) -> Mapping[str, Any]:
    file = folder / name / "results.json"
    if not file.exists():
        file = folder / name / "results" / "results.json"
    document: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document

"""Which variants of a test run in every `make test`, and which are slow ones (`make test-all`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

import pytest
from _pytest.mark.structures import ParameterSet

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
"""Whether tests that could go on for long do so."""


def slow_but_for(quick: Collection[str], names: Iterable[str]) -> list[ParameterSet]:
    """`names` as parameters, all slow but those that are in `quick`.

    Raises:
        ValueError: If one of `quick` is none of `names`.
    """
    names = list(names)
    if unknown := sorted(set(quick) - set(names)):
        raise ValueError(f"no scenarios: {', '.join(unknown)}")
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]

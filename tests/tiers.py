"""Divides variants of a test into those of every `make test` and slow ones (`make test-all`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

import pytest
from _pytest.mark.structures import ParameterSet

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
"""Whether tests of adjustable length run for long."""


def slow_but_for(quick: Collection[str], names: Iterable[str]) -> list[ParameterSet]:
    """`names` as parameters, marked slow except those in `quick`.

    Raises:
        ValueError: If `quick` contains a name that is not in `names`.
    """
    names = list(names)
    if unknown := sorted(set(quick) - set(names)):
        raise ValueError(f"no scenarios: {', '.join(unknown)}")
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]

"""Makes the examples' helper modules and the comparison of `make train` importable; both are plain scripts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

for module, name in (("torch", "PyTorch"), ("sklearn", "scikit-learn"), ("transformers", "transformers")):
    if importlib.util.find_spec(module) is None:  # find_spec avoids imports, which take seconds
        pytest.skip(f"the examples need {name}", allow_module_level=True)


@pytest.fixture
def alone() -> Iterator[object]:
    """A job of one worker, with its process group."""
    from job import join_job

    with join_job() as job:
        yield job

"""The examples are scripts, and their helpers lie beside them; so does the comparison behind `make train`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

pytest.importorskip("torch", reason="the examples need PyTorch")
pytest.importorskip("sklearn", reason="the examples need scikit-learn")
pytest.importorskip("transformers", reason="the examples need transformers")


@pytest.fixture
def alone() -> Iterator[object]:
    """A job of one worker, with its process group."""
    from job import join_job

    with join_job() as job:
        yield job

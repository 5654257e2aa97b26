"""Skips all tests here if TensorFlow is missing, without importing it, which takes seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("tensorflow") is not None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="coarse.tensorflow needs TensorFlow"))

"""Fixtures of the multi-process tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Job, job_of_test


@pytest.fixture
def job() -> Iterator[Job]:
    """Runs workers; fails the test if they leave anything behind."""
    with job_of_test() as started:
        yield started

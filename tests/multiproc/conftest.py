"""Fixtures of the multi-process tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Job, job_of_test
from preloaded_devices import DeviceTemplate

_ABOUT_STARTS = ("test_start", "test_session")
"""Modules whose memory devices are not preloaded."""


@pytest.fixture(scope="session")
def device_template() -> DeviceTemplate:
    return DeviceTemplate()


@pytest.fixture
def job(request: pytest.FixtureRequest, device_template: DeviceTemplate) -> Iterator[Job]:
    """Runs workers; fails the test if they leave anything behind."""
    template = None if request.module.__name__ in _ABOUT_STARTS else device_template
    with job_of_test(template) as started:
        yield started

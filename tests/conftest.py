"""What all tests share, however they were started."""

from __future__ import annotations

import signal

import pytest


def pytest_configure():
    # A shell ignores signals for what it starts in the background, and so would all that the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """A cache folder of the tests' own, so that no profile of this host decides what a test does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield

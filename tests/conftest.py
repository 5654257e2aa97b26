"""What all tests share: a cache folder of their own, so that no profile of this host decides what a test does."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield

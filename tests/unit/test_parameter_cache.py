"""ParameterCache: a read is a hit if and only if its version is new enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coarse.client.memory.parameter_cache import CacheStatistics, ParameterCache


@pytest.mark.parametrize(
    ("staleness", "pulled_at"), [(0, [0, 1, 2, 3, 4, 5]), (1, [0, 2, 4]), (3, [0, 4]), (9, [0])]
)
def test_parameters_are_pulled_when_they_are_too_old(staleness, pulled_at):
    cache = ParameterCache(staleness=staleness, num_bytes=10)
    pulled = []
    for version in range(6):
        if not cache.is_hit(version):
            pulled.append(version)
            cache.filled(version)
    assert pulled == pulled_at
    assert cache.statistics() == CacheStatistics(
        hits=6 - len(pulled_at),
        misses=len(pulled_at),
        largest_lag=min(staleness, 5),
        pulled_bytes=10 * len(pulled_at),
    )


def test_several_reads_at_one_version_pull_once():
    cache = ParameterCache(staleness=0, num_bytes=1)
    assert not cache.is_hit(3)
    cache.filled(3)
    assert cache.is_hit(3)
    assert cache.is_hit(3)


@given(st.integers(0, 4), st.lists(st.integers(0, 3)))
def test_no_read_lags_further_than_allowed(staleness, steps):
    cache, current, held = ParameterCache(staleness=staleness, num_bytes=1), 0, None
    for step in steps:
        current += step
        if not cache.is_hit(current):
            cache.filled(current)
            held = current
        assert held is not None
        assert current - held <= staleness
    assert cache.statistics().largest_lag <= staleness


def test_staleness_is_no_negative_number():
    with pytest.raises(ValueError, match="staleness=-1"):
        ParameterCache(staleness=-1, num_bytes=1)

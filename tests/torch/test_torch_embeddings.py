"""Gradients of large embedding tables are written directly into slots; results equal torch DDP's."""

from __future__ import annotations

import pytest
from comparison import assert_equal_results
from embedding_scenarios import EMBEDDING_SCENARIOS
from parity_pool import WorkerPool

PARITY = [name for name, scenario in EMBEDDING_SCENARIOS.items() if scenario.compare]
COARSE_ONLY = [name for name, scenario in EMBEDDING_SCENARIOS.items() if not scenario.compare]


@pytest.mark.parametrize("name", PARITY)
def test_equals_torch(name: str, ddp_pool: WorkerPool, coarse_pool: WorkerPool) -> None:
    assert_equal_results(name, ddp_pool, coarse_pool, EMBEDDING_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", COARSE_ONLY)
def test_holds(name: str, coarse_pool: WorkerPool) -> None:
    coarse_pool.submit(name)
    coarse_pool.collect()

"""Layers with sparse gradients: the results of torch DDP and its optimizers, while only rows are sent."""

from __future__ import annotations

import pytest
from comparison import assert_equal_results
from parity_pool import WorkerPool
from table_scenarios import TABLE_SCENARIOS

PARITY = [name for name, scenario in TABLE_SCENARIOS.items() if scenario.compare]
COARSE_ONLY = [name for name, scenario in TABLE_SCENARIOS.items() if not scenario.compare]


@pytest.mark.parametrize("name", PARITY)
def test_equals_torch(name: str, ddp_pool: WorkerPool, coarse_pool: WorkerPool) -> None:
    assert_equal_results(name, ddp_pool, coarse_pool, TABLE_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", COARSE_ONLY)
def test_holds(name: str, coarse_pool: WorkerPool) -> None:
    coarse_pool.submit(name)
    coarse_pool.collect()

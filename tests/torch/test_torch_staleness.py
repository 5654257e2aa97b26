"""Training with bounded staleness: results equal a manual computation, and no worker lags more than allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison import assert_equal_results
from launching import COARSE_RUN, WORKERS, launch
from parity_pool import WorkerPool
from staleness_scenarios import STALENESS_SCENARIOS

PARITY = [name for name, scenario in STALENESS_SCENARIOS.items() if scenario.compare]
COARSE_ONLY = [name for name, scenario in STALENESS_SCENARIOS.items() if not scenario.compare]


@pytest.mark.parametrize("name", PARITY)
def test_equals_torch(name: str, ddp_pool: WorkerPool, coarse_pool: WorkerPool) -> None:
    assert_equal_results(name, ddp_pool, coarse_pool, STALENESS_SCENARIOS[name].tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARITY)
def test_equals_torch_across_two_nodes(name: str, ddp_pool: WorkerPool, two_node_pool: WorkerPool) -> None:
    assert_equal_results(name, ddp_pool, two_node_pool, STALENESS_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", COARSE_ONLY)
def test_holds(name: str, coarse_pool: WorkerPool) -> None:
    coarse_pool.submit(name)
    coarse_pool.collect()


@pytest.mark.parametrize("model", ["kept", pytest.param("dropped", marks=pytest.mark.slow)])
def test_a_worker_that_ends_waits_for_its_last_update(tmp_path: Path, model: str) -> None:
    launch(COARSE_RUN, Path(__file__).parent / "staleness_script.py", (str(tmp_path), model))
    assert all((tmp_path / f"end-{rank}").exists() for rank in range(WORKERS))

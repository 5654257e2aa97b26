"""Compares a scenario's results under torch's classes and COARSE's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from parity_pool import WorkerPool


def run_under_both(name: str, torch_pool: WorkerPool, coarse_pool: WorkerPool) -> Iterator[tuple[Any, Any]]:
    """Results of a scenario under torch's classes and COARSE's, worker by worker.

    Torch's results are cached, because several kinds of COARSE pools are compared with them.
    """
    is_new = name not in torch_pool.kept_results
    if is_new:
        torch_pool.submit(name)
    coarse_pool.submit(name)
    try:
        if is_new:
            torch_pool.kept_results[name] = torch_pool.collect()
    finally:
        actual = coarse_pool.collect()
    return zip(torch_pool.kept_results[name], actual, strict=True)


def assert_equal_results(
    name: str, torch_pool: WorkerPool, coarse_pool: WorkerPool, tolerance: float
) -> None:
    """Runs a scenario under both, and compares each worker's results."""
    for rank, (theirs, ours) in enumerate(run_under_both(name, torch_pool, coarse_pool)):
        assert_same(ours, theirs, tolerance, f"worker {rank}")


def assert_same(ours: Any, theirs: Any, tolerance: float, where: str) -> None:
    """Compares nested results; arrays exactly (NaN equals NaN) unless a tolerance is stated."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], tolerance, f"{where}, {key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, tolerance, f"{where}[{index}]")
    elif isinstance(ours, np.ndarray):
        np.testing.assert_allclose(
            ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=where
        )
    else:
        assert ours == theirs, where

"""Skips everything here where torch is missing, and shares the worker pools among all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="coarse.torch needs PyTorch")

from parity_pool import WorkerPool


@pytest.fixture(scope="session")
def ddp_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool("ddp")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def coarse_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool("coarse")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def own_path_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool("coarse, own path")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def stand_in_gpu_pool(cuda_stand_ins: Path) -> Iterator[WorkerPool]:
    pool = WorkerPool("coarse, stand-in GPU", stand_ins=cuda_stand_ins)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def stand_in_gpu_with_slots_pool(cuda_stand_ins: Path) -> Iterator[WorkerPool]:
    pool = WorkerPool("coarse, stand-in GPU that has slots", stand_ins=cuda_stand_ins)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def emulated_gpu_pool(cuda_stand_ins: Path) -> Iterator[WorkerPool]:
    pool = WorkerPool("coarse, stand-in GPU that has slots, emulated machine", stand_ins=cuda_stand_ins)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_node_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool("coarse", num_nodes=2)
    yield pool
    pool.close()

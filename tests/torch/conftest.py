"""Skips all tests here if torch is missing, and shares the worker pools among all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="coarse.torch needs PyTorch")

from parity_pool import WorkerPool

MakePool = Callable[..., WorkerPool]


@pytest.fixture(scope="session")
def make_pool() -> Iterator[MakePool]:
    """Makes a pool that ends with the tests, all of them at once."""
    pools: list[WorkerPool] = []

    def make(strategy: str, **options: Any) -> WorkerPool:
        pools.append(WorkerPool(strategy, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.dismiss()
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def ddp_pool(make_pool: MakePool) -> WorkerPool:
    return make_pool("ddp")


@pytest.fixture(scope="session")
def coarse_pool(make_pool: MakePool) -> WorkerPool:
    return make_pool("coarse")


@pytest.fixture(scope="session")
def direct_allreduce_pool(make_pool: MakePool) -> WorkerPool:
    return make_pool("coarse, direct all-reduce")


@pytest.fixture(scope="session")
def stand_in_gpu_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU", stand_ins=cuda_stand_ins)


@pytest.fixture(scope="session")
def stand_in_gpu_with_slots_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU that has slots", stand_ins=cuda_stand_ins)


@pytest.fixture(scope="session")
def stand_in_gpu_beside_slots_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU beside slots", stand_ins=cuda_stand_ins)


@pytest.fixture(scope="session")
def stand_in_gpu_apart_from_slots_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU apart from slots", stand_ins=cuda_stand_ins)


@pytest.fixture(scope="session")
def stand_in_gpu_along_routes_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU along routes", stand_ins=cuda_stand_ins)


@pytest.fixture(scope="session")
def nccl_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU each, by NCCL", stand_ins=cuda_stand_ins)


@pytest.fixture(scope="session")
def nccl_in_slots_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU each, slots by NCCL", stand_ins=cuda_stand_ins)


@pytest.fixture(scope="session")
def stand_in_gpu_each_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU each", stand_ins=cuda_stand_ins)


@pytest.fixture(scope="session")
def spread_gpus_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU each, spread", stand_ins=cuda_stand_ins)


@pytest.fixture(scope="session")
def partly_apart_gpus_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU each, partly apart", stand_ins=cuda_stand_ins)


@pytest.fixture(scope="session")
def emulated_gpu_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU that has slots, emulated machine", stand_ins=cuda_stand_ins)


@pytest.fixture(scope="session")
def two_node_pool(make_pool: MakePool) -> WorkerPool:
    return make_pool("coarse", num_nodes=2)


@pytest.fixture(scope="session")
def two_node_stand_in_gpu_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU", stand_ins=cuda_stand_ins, num_nodes=2)


@pytest.fixture(scope="session")
def two_node_gpu_slots_pool(make_pool: MakePool, cuda_stand_ins: Path) -> WorkerPool:
    return make_pool("coarse, stand-in GPU that has slots", stand_ins=cuda_stand_ins, num_nodes=2)

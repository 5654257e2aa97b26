"""Skips all tests here if torch is missing, and starts each backend's ranks once for all tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the torch backend needs PyTorch")

from ranks import RankPool, installed_coarse


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH in which COARSE is installed, as far as entry points are concerned."""
    return installed_coarse(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def gloo(site: Path) -> Iterator[RankPool]:
    yield from _pool("gloo", site)


@pytest.fixture(scope="session")
def coarse(site: Path) -> Iterator[RankPool]:
    yield from _pool("coarse", site)


@pytest.fixture(scope="session")
def two_nodes(site: Path) -> Iterator[RankPool]:
    """A node of two ranks, and one of one."""
    yield from _pool("coarse", site, nodes=("a", "a", "b"))


@pytest.fixture(scope="session")
def checked(site: Path) -> Iterator[RankPool]:
    """Where torch compares all calls of all ranks before it makes them."""
    yield from _pool("coarse", site, TORCH_DISTRIBUTED_DEBUG="DETAIL")


def _pool(
    backend: str, site: Path, *, nodes: Sequence[str] = ("", ""), **variables: str
) -> Iterator[RankPool]:
    pool = RankPool(backend, site, nodes=nodes, **variables)
    yield pool
    pool.close()

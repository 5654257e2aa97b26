"""Some of PyTorch's own tests of c10d and DDP (docs/torch-suite.md has them all) pass under the coarse backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import environment
from torch_suite import PASSED, Ranks

pytest.importorskip("expecttest", reason="PyTorch's tests need it")
pytest.importorskip("numpy", reason="PyTorch's tests need it")

NAMES = (
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_max_complex_unsupported",
    "test_all_reduce_full_group_product",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_barrier_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_ddp_create_graph",
    "test_destroy_full_group",
    "test_gather_checks",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_reduce_sum_twice",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag_torch_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
)

pytestmark = pytest.mark.timeout(600)  # the first test starts the ranks, and may have to compile the backend


@pytest.fixture(scope="module")
def ranks(site: Path) -> Iterator[Ranks]:
    ranks = Ranks("coarse", 3, environment(site))
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("name", NAMES)
def test_passes(name: str, ranks: Ranks) -> None:
    assert ranks.run(name) == (PASSED, "")

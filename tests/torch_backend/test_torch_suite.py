"""Some of PyTorch's own tests of c10d and DDP (docs/torch-suite.md has them all) pass with COARSE."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import environment
from torch_suite import PASSED, Ranks, System

pytest.importorskip("expecttest", reason="PyTorch's tests need it")
pytest.importorskip("numpy", reason="PyTorch's tests need it")

NAMES_OF_BACKEND = (
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

NAMES_OF_WRAPPER = (
    "test_DistributedDataParallelCPU",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_ignore_params_arg",
    "test_ddp_join_model_equivalence",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_sync_module_states",
    "test_ddp_uneven_input_exception",
    "test_output_unused_in_loss_dict_module",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
)

pytestmark = pytest.mark.timeout(600)  # the first test starts the ranks, and may have to compile the backend


@pytest.fixture(scope="module")
def ranks(site: Path) -> Iterator[Ranks]:
    ranks = Ranks(System(backend="coarse"), 3, environment(site))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def wrapping_ranks(site: Path) -> Iterator[Ranks]:
    ranks = Ranks(System(wrapper="coarse"), 2, environment(site))
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("name", NAMES_OF_BACKEND)
def test_passes_on_the_backend(name: str, ranks: Ranks) -> None:
    assert ranks.run(name) == (PASSED, "")


@pytest.mark.parametrize("name", NAMES_OF_WRAPPER)
def test_passes_with_models_that_are_wrapped(name: str, wrapping_ranks: Ranks) -> None:
    assert wrapping_ranks.run(name) == (PASSED, "")

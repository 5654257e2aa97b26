"""coarse.torch.DistributedDataParallel trains to the same parameters as torch's, for all promised semantics.

Each scenario of parity_scenarios.py runs with the same seeds in two workers under both classes. With two
workers a sum has one order of additions, and halving is exact. Therefore results must be bitwise equal
unless the scenario states a tolerance.
"""

from __future__ import annotations

import pytest
from comparison import assert_equal_results
from contract_scenarios import CONTRACT_SCENARIOS
from parity_pool import WorkerPool
from parity_scenarios import PARITY_SCENARIOS
from tiers import slow_but_for

PARITY = [name for name, scenario in PARITY_SCENARIOS.items() if scenario.compare]
ACROSS_NODES = [
    "averages_gradients",
    "trains_convolutions_and_batch_norm",
    "trains_float64",
    "trains_bfloat16",
    "trains_float16",
    "trains_mixed_dtypes",
    "starts_from_worker_0_with_large_and_strided_parameters",
    "broadcasts_buffers_before_each_forward",
    "no_sync_accumulates_locally",
    "branches_may_differ_between_workers",
    "a_penalty_on_the_gradient_of_inputs",
    "join_divides_by_remaining_workers",
    "join_with_buffers",
    "two_models_trained_in_turn",
    "takes_a_sub_group",
]
# By which way a reduction goes is decided below the hooks, whose semantics the other scenarios are about.
WHERE_WORKERS_REDUCE = [
    name
    for name in PARITY
    if name.startswith(("trains_", "averages_", "gradients_", "join_", "no_sync_", "unused_", "branches_"))
]
# Where gradients of every kind, and each way to end a backward, meet another way of a reduction.
IN_EVERY_RUN = [
    "averages_gradients",
    "trains_convolutions_and_batch_norm",
    "trains_mixed_dtypes",
    "no_sync_accumulates_locally",
    "branches_may_differ_between_workers",
    "join_divides_by_remaining_workers",
]
ON_A_GPU_IN_EVERY_RUN = [
    "averages_gradients",
    "averages_gradients_that_no_hook_has_seen",
    "trains_mixed_dtypes",
    "join_divides_by_remaining_workers",
    "static_graph",
    "grad_scaler",
    "two_models_trained_in_turn",
    "averages_where_the_processor_copies_gradients",
]
COARSE_ONLY = [name for name, scenario in PARITY_SCENARIOS.items() if not scenario.compare]
COARSE_ONLY += CONTRACT_SCENARIOS


@pytest.mark.parametrize("name", PARITY)
def test_equals_torch(name: str, ddp_pool: WorkerPool, coarse_pool: WorkerPool) -> None:
    assert_equal_results(name, ddp_pool, coarse_pool, PARITY_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(IN_EVERY_RUN, ACROSS_NODES))
def test_equals_torch_across_two_nodes(name: str, ddp_pool: WorkerPool, two_node_pool: WorkerPool) -> None:
    assert_equal_results(name, ddp_pool, two_node_pool, PARITY_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(IN_EVERY_RUN, ACROSS_NODES))
def test_equals_torch_in_memory_of_gpus_across_two_nodes(
    name: str, ddp_pool: WorkerPool, two_node_gpu_slots_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, two_node_gpu_slots_pool, PARITY_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(IN_EVERY_RUN, WHERE_WORKERS_REDUCE))
def test_equals_torch_where_workers_reduce_themselves(
    name: str, ddp_pool: WorkerPool, direct_allreduce_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, direct_allreduce_pool, PARITY_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(ON_A_GPU_IN_EVERY_RUN, PARITY))
def test_equals_torch_on_a_gpu_that_is_stood_in_for(
    name: str, ddp_pool: WorkerPool, stand_in_gpu_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, stand_in_gpu_pool, PARITY_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(ON_A_GPU_IN_EVERY_RUN, PARITY))
def test_equals_torch_where_memory_devices_are_on_that_gpu(
    name: str, ddp_pool: WorkerPool, stand_in_gpu_with_slots_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, stand_in_gpu_with_slots_pool, PARITY_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(ON_A_GPU_IN_EVERY_RUN, PARITY))
def test_equals_torch_where_memory_devices_are_on_another_gpu(
    name: str, ddp_pool: WorkerPool, stand_in_gpu_beside_slots_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, stand_in_gpu_beside_slots_pool, PARITY_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(ON_A_GPU_IN_EVERY_RUN, PARITY))
def test_equals_torch_where_workers_reduce_by_nccl(
    name: str, ddp_pool: WorkerPool, nccl_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, nccl_pool, PARITY_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(ON_A_GPU_IN_EVERY_RUN, PARITY))
def test_equals_torch_where_workers_reduce_slots_by_nccl(
    name: str, ddp_pool: WorkerPool, nccl_in_slots_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, nccl_in_slots_pool, PARITY_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(["averages_gradients"], PARITY))
def test_equals_torch_where_slots_lie_along_routes(
    name: str, ddp_pool: WorkerPool, stand_in_gpu_along_routes_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, stand_in_gpu_along_routes_pool, PARITY_SCENARIOS[name].tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARITY)
def test_equals_torch_where_links_to_that_gpu_are_another_machines(
    name: str, ddp_pool: WorkerPool, emulated_gpu_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, emulated_gpu_pool, PARITY_SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", COARSE_ONLY)
def test_holds(name: str, coarse_pool: WorkerPool) -> None:
    coarse_pool.submit(name)
    coarse_pool.collect()


@pytest.mark.parametrize(
    "name", ["two_models_end_in_any_order", "two_models_with_unused_parameters_end_in_any_order"]
)
def test_holds_on_a_gpu_that_is_stood_in_for(name: str, stand_in_gpu_pool: WorkerPool) -> None:
    stand_in_gpu_pool.submit(name)
    stand_in_gpu_pool.collect()

"""Optimizers in the memory devices: torch's results, and further guarantees.

Each scenario of optimizer_scenarios.py, optimizer_parts_scenarios.py and narrow_optimizer_scenarios.py runs with the
same seeds in two workers under torch's classes and COARSE's, for 200 steps by default. Parameters and state must
agree within the scenario's tolerance.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from bert_optimizer_scenarios import BERT_SCENARIOS, SAME_GRADIENTS_SCENARIOS
from comparison import assert_equal_results, run_under_both
from launching import COARSE_RUN, launch
from narrow_optimizer_scenarios import NARROW_SCENARIOS
from optimizer_parts_scenarios import PARTS_SCENARIOS
from optimizer_scenarios import OPTIMIZER_SCENARIOS
from parity_pool import WorkerPool
from tiers import slow_but_for
from written_pages import tells_written_pages

SCENARIOS = {**OPTIMIZER_SCENARIOS, **PARTS_SCENARIOS, **NARROW_SCENARIOS}

PARITY = [name for name, scenario in SCENARIOS.items() if scenario.compare]
# Needs a kernel that tells which pages a worker has written, and parameters in the host's memory.
WRITTEN_BY_EACH_WORKER = [
    "averages_are_evaluated_by_each_worker_for_itself_in_step",
    "averages_are_evaluated_by_each_worker_for_itself_overlapped",
    "what_every_worker_writes_counts_once_in_step",
    "what_every_worker_writes_counts_once_overlapped",
]
if not tells_written_pages():
    PARITY = [name for name in PARITY if name not in WRITTEN_BY_EACH_WORKER]
# Where memory devices are on a GPU, kernels make the updates, whenever these begin.
ON_A_GPU = [
    name for name in PARITY if not name.endswith("_overlapped") and name not in WRITTEN_BY_EACH_WORKER
]
# Every optimizer in float32; one of two states as 16-bit parameters have it, and where updates are made in backward.
# Each rule in each type is compared with formulas in tests/native/update_test.cpp.
VARIANTS = [name for name in PARITY if name.endswith(("_overlapped", "float16_in_step"))]
IN_EVERY_RUN = [
    *[name for name in PARITY if name not in VARIANTS],
    "sgd_with_momentum_overlapped",
    "adamw_overlapped",
    "adamw_bfloat16_in_step",
    "adamw_float16_overlapped",
    "accumulates_gradients_overlapped",
    "leaves_unused_parameters_alone_overlapped",
    "parameters_that_are_assigned_overlapped",
    "two_optimizers_overlapped",
    "adversaries_of_one_model_overlapped",
    "a_layer_that_is_thawed_overlapped",
]
ON_A_GPU_IN_EVERY_RUN = [
    "sgd_with_momentum_in_step",
    "adamw_in_step",
    "adamw_bfloat16_in_step",
    "mixed_with_float16",
    "unscales_and_clips_within_the_update",
]
COPIED_TO_A_GPU_IN_EVERY_RUN = [
    "adamw_in_step",
    "adamw_overlapped",
    "adamw_bfloat16_in_step",
    "unscales_and_clips_within_the_update",
    "parameters_that_are_assigned_in_step",
]
CHECKPOINTS_ON_A_GPU = [
    "adamw_resumed_in_memory_devices",
    "adamw_resumed_overlapped",
    "master_weights_come_back",
    "snapshots_hold_what_a_copy_would_hold",
    "what_is_loaded_does_not_get_into_a_snapshot",
]
CHECKPOINTS_ON_A_GPU_IN_EVERY_RUN = [
    "adamw_resumed_in_memory_devices",
    "snapshots_hold_what_a_copy_would_hold",
]
BERT_IN_EVERY_RUN = ["bert_adamw_float32", "bert_adamw_bfloat16"]
SAME_GRADIENTS_IN_EVERY_RUN = ["bert_adamw_float16_on_the_same_gradients"]
ACROSS_NODES_IN_EVERY_RUN = [
    "sgd_with_momentum_overlapped",
    "adamw_in_step",
    "adamw_bfloat16_in_step",
    "leaves_unused_parameters_alone_overlapped",
    "large_parameters_that_a_worker_leaves_out_overlapped",
    "unscales_and_clips_within_the_update",
    "a_layer_that_is_thawed_in_step",
]
ON_A_GPU_ACROSS_NODES_IN_EVERY_RUN = [
    "adamw_in_step",
    "adamw_overlapped",
    "large_parameters_that_a_worker_leaves_out_overlapped",
]
COARSE_ONLY = [name for name, scenario in SCENARIOS.items() if not scenario.compare]
if not tells_written_pages():
    COARSE_ONLY.remove("parameters_that_are_written_during_their_update_are_told")
# Nodes share no memory, and do not tell each other whose gradient was not finite.
ON_ONE_NODE = ["nonfinite_gradients_raise_and_name_the_worker", "parameters_and_state_live_once"]


@pytest.mark.parametrize("name", slow_but_for(IN_EVERY_RUN, PARITY))
def test_equals_torch(name: str, ddp_pool: WorkerPool, coarse_pool: WorkerPool) -> None:
    assert_equal_results(name, ddp_pool, coarse_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(ON_A_GPU_IN_EVERY_RUN, ON_A_GPU))
def test_equals_torch_where_memory_devices_are_on_a_gpu(
    name: str, ddp_pool: WorkerPool, stand_in_gpu_with_slots_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, stand_in_gpu_with_slots_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(COPIED_TO_A_GPU_IN_EVERY_RUN, PARITY))
def test_equals_torch_where_updates_are_copied_to_a_gpu(
    name: str, ddp_pool: WorkerPool, stand_in_gpu_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, stand_in_gpu_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(COPIED_TO_A_GPU_IN_EVERY_RUN, PARITY))
def test_equals_torch_where_updates_are_copied_from_another_gpu(
    name: str, ddp_pool: WorkerPool, stand_in_gpu_beside_slots_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, stand_in_gpu_beside_slots_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(["adamw_in_step"], PARITY))
def test_equals_torch_where_slots_lie_along_routes(
    name: str, ddp_pool: WorkerPool, stand_in_gpu_along_routes_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, stand_in_gpu_along_routes_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(["adamw_in_step"], PARITY))
def test_equals_torch_where_updates_go_through_the_host_to_a_gpu(
    name: str, ddp_pool: WorkerPool, stand_in_gpu_apart_from_slots_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, stand_in_gpu_apart_from_slots_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(["adamw_overlapped"], PARITY))
def test_equals_torch_where_parameters_are_on_the_gpu_of_one_worker(
    name: str, ddp_pool: WorkerPool, stand_in_gpu_each_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, stand_in_gpu_each_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(COPIED_TO_A_GPU_IN_EVERY_RUN, PARITY))
def test_equals_torch_where_parameters_are_spread_over_gpus(
    name: str, ddp_pool: WorkerPool, spread_gpus_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, spread_gpus_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(["adamw_overlapped"], PARITY))
def test_equals_torch_where_one_of_the_gpus_cannot_reach_all_slots(
    name: str, ddp_pool: WorkerPool, partly_apart_gpus_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, partly_apart_gpus_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(CHECKPOINTS_ON_A_GPU_IN_EVERY_RUN, CHECKPOINTS_ON_A_GPU))
def test_checkpoints_hold_where_memory_devices_are_on_a_gpu(
    name: str, stand_in_gpu_with_slots_pool: WorkerPool
) -> None:
    stand_in_gpu_with_slots_pool.submit(name)
    stand_in_gpu_with_slots_pool.collect()


@pytest.mark.parametrize("name", slow_but_for(CHECKPOINTS_ON_A_GPU_IN_EVERY_RUN, CHECKPOINTS_ON_A_GPU))
def test_checkpoints_hold_where_parameters_are_spread_over_gpus(
    name: str, spread_gpus_pool: WorkerPool
) -> None:
    spread_gpus_pool.submit(name)
    spread_gpus_pool.collect()


@pytest.mark.parametrize("name", slow_but_for(CHECKPOINTS_ON_A_GPU_IN_EVERY_RUN, CHECKPOINTS_ON_A_GPU))
def test_checkpoints_hold_where_updates_are_copied_to_a_gpu(name: str, stand_in_gpu_pool: WorkerPool) -> None:
    stand_in_gpu_pool.submit(name)
    stand_in_gpu_pool.collect()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("name", slow_but_for(BERT_IN_EVERY_RUN, BERT_SCENARIOS))
def test_trains_bert_as_torch_does(name: str, ddp_pool: WorkerPool, coarse_pool: WorkerPool) -> None:
    tolerance = BERT_SCENARIOS[name].tolerance
    for theirs, ours in run_under_both(name, ddp_pool, coarse_pool):
        (_, expected), (_, moved) = theirs["moved"], ours["moved"]
        distance = np.linalg.norm(moved - expected) / np.linalg.norm(expected)
        assert distance < tolerance, f"parameters are {distance:.1e} of the way apart"
        np.testing.assert_allclose(ours["losses"][1], theirs["losses"][1], atol=tolerance)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("name", slow_but_for(SAME_GRADIENTS_IN_EVERY_RUN, SAME_GRADIENTS_SCENARIOS))
def test_updates_16_bit_bert_as_exactly_as_float32(name: str, coarse_pool: WorkerPool) -> None:
    coarse_pool.submit(name)
    coarse_pool.collect()


@pytest.mark.parametrize("arguments", [(), pytest.param(("overlap",), marks=pytest.mark.slow)])
def test_what_the_wrapper_registered_is_freed_without_a_collection(arguments: tuple[str, ...]) -> None:
    launch(COARSE_RUN, Path(__file__).parent / "freed_memory_script.py", arguments)


def test_workers_may_build_on_the_meta_device_and_take_values_from_the_first() -> None:
    said = launch(COARSE_RUN, Path(__file__).parent / "meta_device_script.py", ())
    assert said.count("as worker 0") == 2


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("accelerate", "transformers"))), reason="needs accelerate"
)
def test_workers_may_build_without_weights_and_take_those_that_the_first_has_loaded() -> None:
    said = launch(COARSE_RUN, Path(__file__).parent / "empty_weights_script.py", ())
    assert said.count("as worker 0") == 2


def test_memory_that_is_gone_when_it_is_reserved_leaves_the_model_as_it_was() -> None:
    said = launch(COARSE_RUN, Path(__file__).parent / "memory_shortage_script.py", ())
    assert said.count("averages as before") == 2
    assert "memory for states needs 2.0 MiB of host memory, 1.0 MiB are available" in said
    assert "another worker of the job cannot allocate the memory" in said


@pytest.mark.parametrize("name", COARSE_ONLY)
def test_holds(name: str, coarse_pool: WorkerPool) -> None:
    coarse_pool.submit(name)
    coarse_pool.collect()


@pytest.mark.parametrize("name", slow_but_for(ACROSS_NODES_IN_EVERY_RUN, PARITY))
def test_equals_torch_across_two_nodes(name: str, ddp_pool: WorkerPool, two_node_pool: WorkerPool) -> None:
    assert_equal_results(name, ddp_pool, two_node_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(ON_A_GPU_ACROSS_NODES_IN_EVERY_RUN, PARITY))
def test_equals_torch_from_gpus_across_two_nodes(
    name: str, ddp_pool: WorkerPool, two_node_stand_in_gpu_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, two_node_stand_in_gpu_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize("name", slow_but_for(ON_A_GPU_ACROSS_NODES_IN_EVERY_RUN, PARITY))
def test_equals_torch_in_memory_of_gpus_across_two_nodes(
    name: str, ddp_pool: WorkerPool, two_node_gpu_slots_pool: WorkerPool
) -> None:
    assert_equal_results(name, ddp_pool, two_node_gpu_slots_pool, SCENARIOS[name].tolerance)


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        [
            "nonfinite_gradients_are_skipped_by_all",
            "parameters_that_nobody_made_equal_become_the_first_workers",
        ],
        [name for name in COARSE_ONLY if name not in ON_ONE_NODE],
    ),
)
def test_holds_across_two_nodes(name: str, two_node_pool: WorkerPool) -> None:
    two_node_pool.submit(name)
    two_node_pool.collect()

"""Two workers under coarse.tensorflow.Strategy train to the results of one process, equal on both workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import HERE, Job

pytestmark = pytest.mark.timeout(1000)

WORKERS = 2
LIKE_ONE_PROCESS = [
    "dense",
    "several_steps_per_execution_and_batch_norm",
    "embedding_and_accumulation",
    "embedding",
    "eager",
    "without_compiler",
    "offloaded_fit",
    "own_loop",
    "batches_in_memory_of_numpy",
    "shuffled_by_seeds_of_its_own",
    "generators_that_end",
]
TRAINED_BY_KERAS = LIKE_ONE_PROCESS[:-5]
SCENARIOS = [
    *LIKE_ONE_PROCESS,
    "fewer_rows_than_workers",
    "unlike_numbers_of_batches",
    "shuffled_and_clipped",
    "mixed_precision",
    "saving",
    "interrupted",
    "files_of_callbacks",
    "metrics_of_the_guide",
    "saved_by_all",
    "models_one_after_another",
]


MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
LAUNCHER = (sys.executable, "-m", "coarse", "run") if MPIRUN is None else (MPIRUN,)
PYTHON = () if MPIRUN is None else (sys.executable,)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By number of workers and rank: what each scenario returned."""
    directory = tmp_path_factory.mktemp("results")
    worker = str(HERE / "scenario_worker.py")
    alone = Job(sys.executable, worker, str(directory))
    together = Job(*LAUNCHER, "-n", str(WORKERS), *PYTHON, worker, str(directory))
    ends = [job.finish() for job in (alone, together)]
    for code, printed in ends:
        assert code == 0, printed
    names = [(1, 0), *((WORKERS, rank) for rank in range(WORKERS))]
    found = {name: json.loads((directory / "{}-{}.json".format(*name)).read_text()) for name in names}
    found["printed"] = ends[0][1]
    return found


def scenario_of(results, name):
    """What it returned in one process, and on each of the workers."""
    returned = [results[1, 0][name], *(results[WORKERS, rank][name] for rank in range(WORKERS))]
    for each in returned:
        assert "error" not in each, each["error"]
    return returned[0], returned[1:]


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_workers_end_with_the_same_weights(results, name):
    _, workers = scenario_of(results, name)
    assert len({worker["digest"] for worker in workers}) == 1


@pytest.mark.parametrize("name", LIKE_ONE_PROCESS)
def test_losses_and_weights_are_those_of_one_process(results, name):
    alone, workers = scenario_of(results, name)
    for worker in workers:
        assert worker["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert worker["weights"] == pytest.approx(alone["weights"], rel=1e-5)


@pytest.mark.parametrize("name", TRAINED_BY_KERAS)
def test_metrics_are_those_of_one_process_on_every_worker(results, name):
    alone, workers = scenario_of(results, name)
    for worker in workers:
        assert worker["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-5)


@pytest.mark.parametrize("name", TRAINED_BY_KERAS)
def test_predictions_have_all_rows_in_order_on_every_worker(results, name):
    alone, workers = scenario_of(results, name)
    for worker in workers:
        assert worker["rows in order"]
        assert worker["predicted"] == pytest.approx(alone["predicted"], rel=1e-3, abs=1e-4)


def test_what_is_logged_is_the_mean_over_the_workers(results):
    alone, workers = scenario_of(results, "logs")
    assert workers[0] == workers[1]
    for worker in workers:
        assert worker["seen"]["rows"] == [16, 16, 13]  # whole numbers are each worker's own
        for name in ("mine", "exact", "loss", "mae"):
            assert worker["seen"][name] == pytest.approx(alone["seen"][name], rel=1e-5), name
        assert worker["eager"]["mine"] == pytest.approx(alone["eager"]["mine"], rel=1e-5)


def test_a_loss_that_is_nan_on_one_worker_ends_training_on_all(results):
    alone, workers = scenario_of(results, "logs")
    assert [each["batches"] for each in (alone, *workers)] == [[0, 1]] * 3


def test_training_goes_on_from_the_backup_that_the_first_worker_alone_finds(results):
    _, workers = scenario_of(results, "interrupted")
    for worker in workers:
        assert worker["epochs"] == [2]
        assert worker["digest"] == worker["digest of the whole"]
        assert worker["states alike"]
    assert len({worker["digest of what was begun"] for worker in workers}) == 1


def test_what_the_first_worker_writes_in_fit_is_there_after_it_on_all(results):
    _, workers = scenario_of(results, "files_of_callbacks")
    assert [worker["is there"] for worker in workers] == [True, True]


def test_shuffling_leaves_what_a_process_draws_alone(results):
    alone, workers = scenario_of(results, "shuffled_by_seeds_of_its_own")
    assert all(each["draws alike"] for each in workers), alone


def test_metrics_of_a_step_as_in_the_guide_count_all_rows(results):
    alone, workers = scenario_of(results, "metrics_of_the_guide")
    for worker in workers:
        for name in ("auc", "precision"):
            assert worker[name] == pytest.approx(alone[name], rel=1e-5), name


@pytest.mark.parametrize(("optimizer", "model_mib"), [("offloaded", 23.0), ("on workers", 4.6)])
def test_memory_devices_give_back_what_models_took_that_are_gone(results, optimizer, model_mib):
    _, (first, _) = scenario_of(results, "models_one_after_another")  # who knows of the devices
    mib = first[optimizer]
    # Four more models come, and how many of those before are there at a time depends on when they are collected.
    assert max(mib[4:]) < max(mib[:4]) + 2 * model_mib, mib


def test_files_that_all_workers_save_at_once_are_whole(results):
    _, workers = scenario_of(results, "saved_by_all")
    for worker in workers:
        assert worker["digests"] == [worker["digest"]] * 3
        shards = [f"cut_{number:05}.weights.h5" for number in range(len(worker["left"]) - 4)]
        assert worker["left"] == ["cut.weights.json", *shards, "whole.h5", "whole.keras", "whole.weights.h5"]


def test_an_infinity_on_one_worker_skips_the_step_on_all(results):
    _, workers = scenario_of(results, "mixed_precision")
    assert [worker["steps"] for worker in workers] == [2, 2]  # of three


def test_values_are_reduced_and_gathered(results):
    _, workers = scenario_of(results, "own_loop")
    for worker in workers:
        assert worker["gathered"] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
        assert worker["sum of whole numbers"] == 6
        assert worker["mean of whole numbers"] == 7
        assert worker["mean of rows"] == 7.0


def test_rows_of_tables_are_added_up_by_their_numbers(results):
    _, workers = scenario_of(results, "rows_of_tables")
    (first, second), third = ([5, 0, 5, 3], [3, 1, 3, 3]), [2]
    for worker in workers:
        assert worker["found"] == 3 * [
            table_of([first, second], 1),
            table_of([[], third], 1),
            table_of([first, second], 2),
        ]
        assert (worker["ops"], worker["calls"]) == (3, 0)


def table_of(rows, divisor):
    """What rows_of_tables finds of the rows of each worker."""
    total = {}
    for rank, own in enumerate(rows):
        for place, row in enumerate(own):
            total[row] = total.get(row, 0) + np.array([[row + 1, 10 * rank], [0.5, place]]) / divisor
    return {"rows": sorted(total), "values": [total[row].tolist() for row in sorted(total)]}


RULES = {"sgd": 0, "momentum": 1, "nesterov": 1, "adam": 3, "adamw": 2}  # and how many states


@pytest.mark.parametrize("rule", RULES)
def test_200_updates_in_memory_devices_are_those_of_keras(results, rule):
    alone, workers = scenario_of(results, "offloaded_optimizers")
    expected = alone[rule]
    assert "a job of one worker has no memory devices" in expected["said"][0]
    for worker in workers:
        found = worker[rule]
        assert found["said"] == []
        for kind, tolerance in (("weights", 5e-5), ("states", 5e-5)):
            ours, theirs = (flat(each[kind]) for each in (found, expected))
            assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
        # The states themselves are not on the workers.
        assert expected["on the worker"] - found["on the worker"] == RULES[rule] * len(found["weights"])
    assert workers[0][rule]["digest"] == workers[1][rule]["digest"]


def flat(arrays):
    """The difference of all weights, or of all saved states by their numbers."""
    arrays = [arrays[key] for key in sorted(arrays, key=int)] if isinstance(arrays, dict) else arrays
    return [number for array in arrays for number in array]


def test_a_saved_model_has_the_state_of_memory_devices_and_goes_on_from_it(results):
    alone, workers = scenario_of(results, "offloaded_fit")
    for worker in workers:
        assert worker["loaded state"] == pytest.approx(alone["loaded state"], rel=1e-5)
        assert worker["continued"][0] == worker["continued"][1]
        assert worker["digests"][0] == worker["digests"][1]
        assert worker["states alike"]
        assert worker["continued"][0] == pytest.approx(alone["continued"][0], rel=1e-6)


def test_checkpoints_of_keras_and_of_memory_devices_are_the_same(results):
    alone, workers = scenario_of(results, "offloaded_checkpoints")
    for worker in workers:
        uninterrupted, restored = worker["digests"]
        assert uninterrupted == restored
        assert worker["moved digests"][0] == worker["moved digests"][1]
        assert worker["states alike"]
        assert worker["kinds"] == ["DeviceState", "Variable"]
        # Keras does the last three steps of the second model, from the memory devices' checkpoint.
        ours, by_keras, expected = (flat(each) for each in (*worker["weights"], alone["weights"][0]))
        assert ours == pytest.approx(expected, rel=5e-5, abs=5e-5)
        assert by_keras == pytest.approx(expected, rel=5e-5, abs=5e-5)
        assert flat(worker["states"]) == pytest.approx(flat(alone["states"]), rel=5e-5, abs=5e-5)
        assert [re.sub(r"_\d+", "", name) for name in worker["names"]] == [
            re.sub(r"_\d+", "", name) for name in alone["names"]
        ]
    assert workers[0]["digests"] == workers[1]["digests"]
    assert workers[0]["states"] == workers[1]["states"]


@pytest.mark.parametrize(
    ("name", "iterations"),
    # Two batches are one step where gradients are accumulated, and the one with an infinity is none.
    [("accumulation and moving average", 8), ("loss scale", 16)],
)
def test_what_keras_puts_around_updates_in_memory_devices(results, name, iterations):
    alone, workers = scenario_of(results, "offloaded_and_wrapped")
    assert alone[name]["kinds"] == ["Variable"]
    for worker in workers:
        found = worker[name]
        assert found["kinds"] == ["DeviceState", "Variable"]
        assert found["iterations"] == alone[name]["iterations"] == iterations
        for kind in ("weights", "states"):
            ours, theirs = (flat(each[kind]) for each in (found, alone[name]))
            assert ours == pytest.approx(theirs, rel=5e-5, abs=5e-5)
    assert workers[0][name]["digest"] == workers[1][name]["digest"]


def test_optimizers_in_memory_devices_in_mixed_precision_and_eagerly(results):
    alone, workers = scenario_of(results, "offloaded_eagerly_in_mixed_precision")
    for worker in workers:
        assert worker["kinds"] == ["LossScaleOptimizer", "DeviceState"]
        assert worker["steps"] == alone["steps"] == 2  # of three
        # Float16 rounds the sums of half a batch and of a whole one differently.
        assert flat(worker["weights"]) == pytest.approx(flat(alone["weights"]), rel=5e-4, abs=5e-4)
        assert worker["states alike"]
        assert worker["number of states"] == alone["number of states"] == 9
    assert workers[0]["digest"] == workers[1]["digest"]


def test_rows_that_become_whole_gradients_are_told_on_the_first_worker_once(results):
    _, (first, second) = scenario_of(results, "offloaded_eagerly_in_mixed_precision")
    assert first["said"].count("IndexedSlices") == 1
    assert "0.0 MiB per update and worker" in first["said"]
    assert second["said"] == ""


def test_an_optimizer_that_memory_devices_do_not_know_stays_and_says_so(results):
    _, workers = scenario_of(results, "offloaded_fit")
    for worker in workers:
        (said,) = worker["said"]
        assert said.startswith("RMSprop runs on the workers")
        assert "SGD, Adam and AdamW" in said


def test_callbacks_write_on_the_first_worker_alone(results):
    _, (first, second) = scenario_of(results, "saving")
    assert {"best.keras", "backup", "log.csv", "board"} <= set(first["written"])
    assert second["written"] == []


def test_what_is_saved_loads_without_the_strategy(results):
    _, (first, _) = scenario_of(results, "saving")
    assert len(first["digests"]) == 3
    assert len(set(first["digests"])) == 1


def test_without_a_compiler_the_slower_way_is_told(results):
    _, workers = scenario_of(results, "without_compiler")
    for worker in workers:
        assert "tensors are reduced through Python, which is slower" in worker["said"]
        assert "install g++" in worker["said"]


def test_a_tensor_is_pushed_before_others_are_there(results):
    """The second worker brings its last tensor first, and the next one when that has been reduced."""
    _, workers = scenario_of(results, "many_in_flight")
    for worker in workers:
        assert worker["sums"] == [100.0 + 2 * i for i in range(64)]


def test_what_is_a_constant_of_one_worker_is_reduced_every_time(results):
    _, workers = scenario_of(results, "constants")
    for worker in workers:
        assert worker["found"] == [[64, 128.0], [60, 120.0], [62, 124.0], [62, 124.0]]


def test_what_was_built_outside_of_scope_is_named(results):
    _, workers = scenario_of(results, "scope_missing")
    for said in workers:
        assert "was built outside of strategy.scope()" in said["fit in scope"]
        for made, by in (("metric 'of_each_worker'", "metric"), ("optimizer 'sgd", "optimizer")):
            assert said[by].startswith(made)
            assert "made outside of strategy.scope()" in said[by]
        assert said["metric of one batch"].startswith("metric 'of_each_worker'")
        assert "'of_each_worker:0' was created outside of strategy.scope()" in said["update"]
        assert "each worker trains one of its own" in said["fit"]
        for where, times in (("applied", 1), ("applied in scope", 1), ("applied in run", 0)):
            assert said[where].count("outside of strategy.run(), where they are not reduced") == times, where


def test_data_without_batches_does_not_build_a_model(results):
    _, workers = scenario_of(results, "scope_missing")
    for said in workers:
        assert said["no batches"].startswith("the data for model 'unbuilt' has no batches")


def test_a_step_that_xla_is_to_compile_is_refused(results):
    _, workers = scenario_of(results, "scope_missing")
    for said in workers:
        assert "jit_compile=True" in said["jit_compile"]
        assert "jit_compile=False" in said["jit_compile"]


def test_workers_may_have_unlike_numbers_of_rows_or_none(results):
    alone, workers = scenario_of(results, "fewer_rows_than_workers")
    for worker in workers:
        assert worker["predicted"] == [1, 1]
        for theirs, ours in zip(alone["evaluated"], worker["evaluated"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert np.isfinite([*worker["eager"]["loss"], *worker["eager"]["mae"]]).all()


def test_every_row_of_uneven_batches_counts_alike_in_weights_losses_and_metrics(results):
    alone, workers = scenario_of(results, "uneven_rows")
    for worker in workers:
        for name, expected in alone.items():
            for kind, values in expected.items():
                assert worker[name][kind] == pytest.approx(values, rel=1e-5, abs=1e-6), (name, kind)


def test_a_worker_with_fewer_batches_trains_on_with_the_others(results):
    alone, workers = scenario_of(results, "unlike_numbers_of_batches")
    for worker in workers:
        for kind in ("weights", "loss", "mae"):
            assert worker[kind] == pytest.approx(alone[kind], rel=1e-5, abs=1e-6), kind


def test_rows_count_alike_in_losses_within_functions_and_branches(results):
    alone, workers = scenario_of(results, "losses_in_functions")
    for worker in workers:
        for name, weights in alone.items():
            assert worker[name] == pytest.approx(weights, rel=1e-5, abs=1e-6), name


def test_weights_that_are_merely_frozen_do_not_travel(results):
    _, workers = scenario_of(results, "statistics_of_batches")
    for worker in workers:
        assert worker["averaged"] == ["moving_mean", "moving_variance"]


def test_one_worker_saves_in_scope_without_the_others(results):
    alone, workers = scenario_of(results, "one_alone")
    assert workers[0]["saved"] == ["own.keras", "own.weights.h5"]
    assert [each["checkpoint"] for each in (alone, workers[0])] == [True, True]


def test_libraries_are_told_which_worker_this_is(results):
    _, workers = scenario_of(results, "one_alone")
    assert [worker["task"] for worker in workers] == [["worker", rank, rank] for rank in range(WORKERS)]
    assert [worker["tasks"] for worker in workers] == [WORKERS] * WORKERS


def test_all_workers_evaluate_and_save_by_the_same_statistics_of_batches(results):
    _, (first, second) = scenario_of(results, "statistics_of_batches")
    assert first["had own"]  # so that there was something to average
    for name in ("at epochs", "behind train_on_batch", "evaluated"):
        assert first[name] == second[name]


def test_the_first_worker_alone_shows_progress(results):
    alone, workers = scenario_of(results, "statistics_of_batches")
    assert [each["shows progress"] for each in (alone, *workers)] == [True, True, False]


def test_an_unknown_operation_is_refused_in_replicas_too(results):
    _, workers = scenario_of(results, "scope_missing")
    for said in workers:
        assert "'MAX' is not a valid ReduceOp" in said["MAX"]
        assert "is not a valid ReduceOp" in said["product"]


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpich")
def test_ranks_are_those_of_mpirun(results):
    assert [results[WORKERS, rank]["launched by"] for rank in range(WORKERS)] == [["PMI_RANK"], ["PMI_RANK"]]


def test_one_worker_alone_says_so(results):
    assert "this process is the only one" in results["printed"]


def test_torch_is_not_imported(results):
    assert all(results[key]["modules"] == [] for key in results if isinstance(key, tuple))

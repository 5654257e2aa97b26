"""Plans and command lines of a benchmark: impossible measurements are refused before anything starts."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import pytest

from coarse.bench import memory
from coarse.bench.harness.commands import BenchError
from coarse.bench.models import MODELS, NUM_PARAMETERS, build_workload
from coarse.bench.sync import driver as sync
from coarse.bench.sync.driver import SyncPlan, run_sync
from coarse.bench.train_step import driver as train
from coarse.bench.train_step.driver import TrainPlan, run_train
from coarse.bench.train_step.systems import gpu_of_worker
from coarse.cli import bench

SYNC: dict[str, Any] = {"systems": ("gloo",), "num_workers": 2, "sizes": (4096,)}
TRAIN: dict[str, Any] = {
    "systems": ("ddp",),
    "model": "digits",
    "batch": 1,
    "sequence": 32,
    "num_workers": 2,
    "threads": 1,
    "optimizer": "adamw",
}


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *arguments])


@pytest.mark.parametrize(
    "wrong",
    [
        {"sizes": ()},
        {"sizes": (4095,)},
        {"sizes": (0,)},
        {"systems": ()},
        {"dtype": "float8"},
        {"num_workers": 1},
        {"rounds": 0},
        {"budget_s": 0.0},
        {"memory_devices": "-1"},
        {"memory_devices": "65"},
        {"memory_devices": "numa:"},
    ],
)
def test_sync_plan_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        SyncPlan(**{**SYNC, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "gpt"},
        {"optimizer": "lion"},
        {"batch": 0},
        {"steps": -1},
        {"systems": ()},
        {"device": "tpu"},
        {"device": "cuda:"},
    ],
)
def test_train_plan_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        TrainPlan(**{**TRAIN, **wrong})


def test_workers_share_gpus_by_rank_or_have_the_one_that_is_named():
    assert [gpu_of_worker("cuda", rank=rank, num_gpus=2) for rank in range(3)] == [0, 1, 0]
    assert gpu_of_worker("cuda", rank=1, num_gpus=0) == 0  # which is then said to be missing
    assert gpu_of_worker("cuda:3", rank=1, num_gpus=2) == 3
    assert parse("train-step", "--device", "cuda:0").device == "cuda:0"


def test_memory_that_cannot_be_had_is_refused_with_numbers() -> None:
    with pytest.raises(BenchError, match=r"may need \d+\.\d GiB, \d+\.\d GiB are available"):
        run_sync(SyncPlan(**{**SYNC, "sizes": (1 << 50,)}))
    with pytest.raises(BenchError, match=r"need at least \d+\.\d GiB, \d+\.\d GiB are available"):
        run_train(TrainPlan(**{**TRAIN, "num_workers": 1_000_000}))


def test_command_line_reads_sizes_and_peers() -> None:
    arguments = parse("sync", "--sizes", "4KiB,1MiB", "--against", "gloo, mpich")
    assert arguments.sizes == (4096, 1 << 20)
    assert arguments.against == ("gloo", "mpich")
    assert arguments.handler is bench.run_sync_command


def test_command_line_defaults_are_those_of_the_published_tables() -> None:
    arguments = parse("sync")
    assert arguments.sizes == (4 << 10, 64 << 10, 1 << 20, 25 << 20, 100 << 20, 400 << 20)
    assert arguments.against == sync.PEERS
    assert parse("train-step").against == ("ddp", "ddp-tuned", "none")


def test_no_peers_may_be_asked_for() -> None:
    assert parse("sync", "--against", "").against == ()


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [("sync", "--against", "nccl"), ("sync", "--sizes", "4 cows"), ("train-step", "--model", "gpt")],
)
def test_unknown_words_are_refused(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(command, option, value)
    error = capsys.readouterr().err
    assert f"argument {option}" in error
    assert value in error


def test_impossible_plan_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse("sync", "--sizes", "4095B", "--against", "gloo")
    assert arguments.handler(arguments) == 2
    assert "size 4095 B" in capsys.readouterr().err


def test_a_single_process_has_nowhere_to_offload_to(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse("train-step", "--single", "--offload-optimizer")
    assert arguments.handler(arguments) == 2
    assert "--offload-optimizer needs memory devices" in capsys.readouterr().err


def test_names_of_the_command_line_are_those_of_the_benchmarks() -> None:
    assert bench._SYNC_PEERS == sync.PEERS
    assert bench._TRAIN_PEERS == train.PEERS
    assert bench._MEMORY_PEERS == memory.PEERS
    assert tuple(MODELS) == bench._MODELS
    assert {*bench._MODELS_OF_SIZE} < {*MODELS} - {memory.BASELINE_MODEL}


def test_command_line_parser_imports_no_extra() -> None:
    code = (
        "import argparse, sys; from coarse.cli import bench; "
        "bench.add_parser(argparse.ArgumentParser().add_subparsers()); "
        "print(sorted({'torch', 'numpy', 'psutil', 'mpi4py', 'rich', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("model", MODELS)
def test_parameter_counts_are_those_of_the_models(model: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with torch.device("meta"):
        module = build_workload(model, batch=1, sequence=8, rank=0).module
    assert sum(parameter.numel() for parameter in module.parameters()) == NUM_PARAMETERS[model]

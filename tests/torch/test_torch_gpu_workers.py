"""Workers whose gradients take a GPU's path: faults raise errors of the right type, and nothing hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coarse.torch.gradients.paths.gpu_gradients import find_gpu

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("gpu_loss_script.py")
WAITS_SCRIPT = Path(__file__).with_name("gpu_waits_script.py")
CAPTURE_SCRIPT = Path(__file__).with_name("gpu_capture_script.py")
SHORTAGE_SCRIPT = Path(__file__).with_name("gpu_shortage_script.py")
TRAINING_SCRIPT = Path(__file__).with_name("gpu_training_script.py")
LIMIT_S = 200


def run_script(*arguments: str, script: Path = SCRIPT, **variables: str) -> str:
    """What two workers print. By SCRIPT they train a model on the first argument until a memory device is killed."""
    done = subprocess.run(
        [sys.executable, "-m", "coarse", "run", "-n", "2", str(script), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
    )
    return done.stdout


def check_loss(printed: str, reason: str = "SIGKILL") -> None:
    assert printed.count("raised MemoryDeviceLostError after ") == 2, printed
    assert printed.count("all streams have ended") == 2, printed
    assert reason in printed


def check_shortage(printed: str) -> None:
    refusal = (
        r"raised OutOfDeviceMemoryError: .*: 2 workers need [\d.]+ MiB of device memory for 1 tensors, "
        r"[\d.]+ MiB are available on cuda:0"
    )
    assert len(re.findall(refusal, printed)) == 2, printed
    assert printed.count("trains as before") == 2, printed


def test_a_memory_device_that_is_killed_in_a_step_is_told_by_its_type(cuda_stand_ins):
    check_loss(run_script("stand-in", LD_LIBRARY_PATH=str(cuda_stand_ins)))


@pytest.mark.parametrize("options", [(), ("offload",)], ids=["alone", "offload"])
def test_nothing_is_saved_of_a_step_whose_gradients_were_not_averaged(cuda_stand_ins, options):
    """The GPU received the update before the loss; a save then reports it, as the next forward does."""
    printed = run_script("stand-in", "saves", *options, LD_LIBRARY_PATH=str(cuda_stand_ins))
    check_loss(printed)
    assert printed.count("saved after 6 steps") == 2, printed
    assert "saved after 7 steps" not in printed


TWO_GPUS = {"STAND_IN_GPUS": "2", "COARSE_MEMORY_DEVICES": "cuda:0,cuda:1"}


@pytest.mark.parametrize(
    # The last one's links are such that all gradients go to the memory device that lives.
    "where",
    [{}, TWO_GPUS, {"STAND_IN_LINKS": "0:1:300:3", **TWO_GPUS}],
    ids=["host", "gpu", "unneeded"],
)
def test_workers_that_wait_for_averages_have_the_parameters_of_one_step_after_a_loss(cuda_stand_ins, where):
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    printed = run_script("stand-in", COARSE_GPU_TRANSFERS="wait", **where, **libraries)
    check_loss(printed)
    steps = re.findall(r"raised MemoryDeviceLostError after (\d+) steps", printed)
    parameters = re.findall("parameters are ([0-9a-f]+)", printed)
    assert (len(set(steps)), len(parameters), len(set(parameters))) == (1, 2, 1), printed


@pytest.mark.parametrize(("options", "num_joins"), [((), 4), (("buffers",), 8)])
def test_the_processor_waits_for_nothing_in_a_step(cuda_stand_ins, options, num_joins):
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "COARSE_DUAL_SYNC": "off"}
    printed = run_script(*options, script=WAITS_SCRIPT, **libraries)
    assert printed.count(f"waited 0 times in 4 steps with {num_joins} joins") == 2, printed


def test_training_goes_on_after_a_step_that_was_captured_by_mistake(cuda_stand_ins):
    printed = run_script(script=CAPTURE_SCRIPT, LD_LIBRARY_PATH=str(cuda_stand_ins))
    assert printed.count("refused: gradients cannot be averaged while a CUDA graph is captured") == 2, printed
    assert printed.count("goes on") == 2, printed


def test_memory_devices_on_another_gpu_are_reached_without_the_host(cuda_stand_ins):
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    printed = run_script("stand-in", STAND_IN_GPUS="2", COARSE_MEMORY_DEVICES="cuda:1,cuda:1", **libraries)
    check_loss(printed)
    assert "go through the host" not in printed
    assert "are copied synchronously" not in printed


@pytest.mark.parametrize(
    "moment",
    [
        "0:12",
        "1:5",
        *(
            pytest.param(f"{gpu}:{n}", marks=pytest.mark.slow)
            for gpu in (0, 1)
            for n in (1, 2, 3, 4, 7, 16, 25)
        ),
    ],
)
def test_a_memory_device_that_dies_in_an_update_is_told_by_its_type(cuda_stand_ins, moment):
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    gpus = {"STAND_IN_GPUS": "2", "COARSE_MEMORY_DEVICES": "cuda:0,cuda:1", "STAND_IN_PAGE_BYTES": "4096"}
    dies = {"COARSE_ALGORITHM": "direct", "COARSE_ROUTING": "local", "STAND_IN_DIES_AT": moment}
    check_loss(run_script("stand-in", "offload", "alone", **dies, **gpus, **libraries))


@pytest.mark.parametrize("options", [(), ("overlap",)], ids=["in step", "overlapped"])
@pytest.mark.parametrize(
    "moment", ["1:9", *(pytest.param(f"0:{n}", marks=pytest.mark.slow) for n in range(1, 13))]
)
def test_a_gpu_that_fails_while_old_values_are_kept_is_told_with_its_reason(cuda_stand_ins, moment, options):
    """With the optimizer on the GPU, and memory devices that would outlive workers: kernels and copies take turns."""
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    gpus = {"STAND_IN_GPUS": "2", "COARSE_MEMORY_DEVICES": "cuda:0,cuda:1", "STAND_IN_PAGE_BYTES": "4096"}
    faults = {"COARSE_ALGORITHM": "direct", "COARSE_KEEP_DEVICES": "20", "STAND_IN_FAULTS_AT": moment}
    printed = run_script("stand-in", "offload", "alone", *options, **faults, **gpus, **libraries)
    check_loss(printed, reason="CUDA_ERROR_STAND_IN")
    assert "terminate called" not in printed


def test_training_goes_on_over_the_links_that_have_become_better(cuda_stand_ins, tmp_path):
    def train(name: str, *arguments: str, **variables: str) -> list[str]:
        (tmp_path / name).mkdir()
        printed = run_script(str(tmp_path / name), *arguments, script=TRAINING_SCRIPT, **variables)
        ends = [tmp_path / name / f"end-{rank}" for rank in range(2)]
        assert all(end.exists() for end in ends), printed
        return [end.read_text().split()[0] for end in ends]

    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    gpus = {"STAND_IN_GPUS": "3", "COARSE_MEMORY_DEVICES": "cuda:0,cuda:1", "STAND_IN_LINKS": "2:1:10000:8"}
    follows = {"COARSE_ROUTING": "profile", "COARSE_REPLAN_STEPS": "2"}
    expected = train("host", COARSE_MEMORY_DEVICES="2")
    assert train("gpu", "2,2", "2:0:10000:8", **gpus, **follows, **libraries) == expected
    decided = (tmp_path / "gpu" / "decisions-1").read_text()
    assert re.search("step 2: the slots of .* move: w0 to md1, w1 to md1", decided), decided


def test_memory_devices_on_a_gpu_out_of_reach_are_copied_to_by_streams_and_a_warning_says_how(cuda_stand_ins):
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    apart = {"STAND_IN_GPUS": "2", "STAND_IN_GPUS_ARE_APART": "all"}
    printed = run_script("stand-in", COARSE_MEMORY_DEVICES="cuda:1,cuda:1", **apart, **libraries)
    check_loss(printed)
    assert "so tensors go through the host" in printed
    assert "are copied synchronously" not in printed


def test_parameters_on_the_processor_take_no_way_of_a_gpu():
    assert find_gpu([torch.nn.Parameter(torch.zeros(1))]) is None


@pytest.mark.parametrize(
    ("who", "memory_devices"),
    [
        ("device", "2"),
        ("worker", "cuda:0,cuda:1"),
        pytest.param("device", "cuda:0,cuda:1", marks=pytest.mark.slow),
        pytest.param("worker", "2", marks=pytest.mark.slow),
    ],
)
def test_who_is_killed_while_workers_reduce_by_nccl_is_told_by_type(cuda_stand_ins, who, memory_devices):
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    gpus = {"STAND_IN_GPUS": "2", "COARSE_MEMORY_DEVICES": memory_devices, "COARSE_DUAL_SYNC": "1MiB"}
    printed = run_script("stand-in", "each", who, **gpus, **libraries)
    assert "by NCCL between the workers" in printed
    if who == "device":
        return check_loss(printed)
    assert "raised WorkerLostError after " in printed
    assert "all streams have ended" in printed


def test_a_model_too_large_for_its_gpus_memory_devices_is_refused_with_both_numbers(cuda_stand_ins):
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    printed = run_script(
        "stand-in", script=SHORTAGE_SCRIPT, COARSE_MEMORY_DEVICES="cuda:0,cuda:0", **libraries
    )
    check_shortage(printed)
    assert "1024.0 MiB are available on cuda:0 (stand-in)" in printed

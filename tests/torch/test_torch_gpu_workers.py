"""Workers whose gradients take the way of a GPU's: what goes wrong is told by its type, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from coarse.torch.gpu_gradients import find_gpu

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("gpu_loss_script.py")
LIMIT_S = 200


def run_script(device: str, **variables: str) -> str:
    """What two workers print who train on `device` until a memory device is killed."""
    done = subprocess.run(
        [sys.executable, "-m", "coarse", "run", "-n", "2", str(SCRIPT), device],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
    )
    return done.stdout


def check_loss(printed: str) -> None:
    assert printed.count("raised MemoryDeviceLostError after ") == 2, printed
    assert printed.count("all streams have ended") == 2, printed
    assert "SIGKILL" in printed


def test_a_memory_device_that_is_killed_in_a_step_is_told_by_its_type(cuda_stand_ins):
    check_loss(run_script("stand-in", LD_LIBRARY_PATH=str(cuda_stand_ins)))


def test_memory_devices_on_another_gpu_are_reached_without_the_host(cuda_stand_ins):
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    printed = run_script("stand-in", STAND_IN_GPUS="2", COARSE_MEMORY_DEVICES="cuda:1,cuda:1", **libraries)
    check_loss(printed)
    assert "go through the host" not in printed
    assert "while the processor waits" not in printed


def test_where_a_gpu_does_not_reach_another_one_a_warning_says_so(cuda_stand_ins):
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    apart = {"STAND_IN_GPUS": "2", "STAND_IN_GPUS_ARE_APART": "all"}
    printed = run_script("stand-in", COARSE_MEMORY_DEVICES="cuda:1,cuda:1", **apart, **libraries)
    assert "so tensors go through the host" in printed
    assert "while the processor waits, which takes longer" in printed


def test_parameters_on_the_processor_take_no_way_of_a_gpu():
    assert find_gpu([torch.nn.Parameter(torch.zeros(1))]) is None

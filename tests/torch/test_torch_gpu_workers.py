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


def test_parameters_on_the_processor_take_no_way_of_a_gpu():
    assert find_gpu([torch.nn.Parameter(torch.zeros(1))]) is None

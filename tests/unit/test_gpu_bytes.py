"""Information for frameworks about memory on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_script(cuda_stand_ins, what):
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    subprocess.run(
        [sys.executable, Path(__file__).parent / "gpu_bytes_script.py", what],
        env=os.environ | libraries | {"STAND_IN_GPUS": "3"},
        check=True,
        timeout=60,
    )


def test_memory_is_of_the_gpu_that_works_on_it(cuda_stand_ins):
    run_script(cuda_stand_ins, "map")


def test_copies_to_a_gpu_that_is_not_seen_are_tried(cuda_stand_ins):
    run_script(cuda_stand_ins, "reach")

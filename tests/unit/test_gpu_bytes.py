"""What frameworks are told of memory on GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_memory_is_of_the_gpu_that_works_on_it(cuda_stand_ins):
    libraries = {"LD_LIBRARY_PATH": str(cuda_stand_ins), "XDG_CACHE_HOME": str(cuda_stand_ins)}
    subprocess.run(
        [sys.executable, Path(__file__).parent / "gpu_bytes_script.py"],
        env=os.environ | libraries | {"STAND_IN_GPUS": "2"},
        check=True,
        timeout=60,
    )

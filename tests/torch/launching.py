"""Jobs of scripts in this folder, run by a launcher to their end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import coarse

WORKERS = 2
COARSE_RUN = ("coarse", "run", "-n", str(WORKERS))
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS))
LIMIT_S = 300


def launch(
    launcher: tuple[str, ...],
    script: Path,
    arguments: tuple[str, ...],
    *options: str,
    meanwhile: Callable[[subprocess.Popen[bytes]], None] = lambda job: None,
    **variables: str,
) -> str:
    """Runs the script to its end, and a function meanwhile; returns the output."""
    # Sockets have short names: pytest's own temporary directories are too long for them.
    with tempfile.TemporaryDirectory(prefix="coarse-test-") as temporary:
        printed = Path(temporary, "printed")
        with printed.open("w") as output:
            job = subprocess.Popen(
                [sys.executable, "-m", *launcher, *options, str(script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(coarse.__file__).parents[1]),
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": temporary,
                    "COARSE_PROFILE": "off",
                    **variables,
                },
            )
        try:
            meanwhile(job)
            assert job.wait(LIMIT_S) == 0, printed.read_text()
        finally:
            job.kill()
            job.wait()
        assert not [path for path in Path(temporary).iterdir() if path.name.startswith("coarse")]
        return printed.read_text()

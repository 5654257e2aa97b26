"""Jobs of scripts in this folder, run by a launcher to their end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import coarse

WORKERS = 2
COARSE_RUN = ("coarse", "run", "-n", str(WORKERS))
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS))
LIMIT_S = 300


def launch(
    launcher: tuple[str, ...], script: Path, arguments: tuple[str, ...], *options: str, **variables: str
) -> str:
    """Runs the script to its end; returns what was printed."""
    # Sockets have short names: pytest's own temporary directories are too long for them.
    with tempfile.TemporaryDirectory(prefix="coarse-test-") as temporary:
        done = subprocess.run(
            [sys.executable, "-m", *launcher, *options, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(coarse.__file__).parents[1]),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": temporary,
                "COARSE_PROFILE": "off",
                **variables,
            },
        )
        assert done.returncode == 0, done.stdout
        assert not [path for path in Path(temporary).iterdir() if path.name.startswith("coarse")]
    return done.stdout

"""A wheel for another Python or processor, installed into a folder, and run by that Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("all_reduce.py")
_GLIBCS = ("2_28", "2_27", "2_17")


def install(wheel: Path, site: Path, *, version: str, architecture: str) -> None:
    """Installs a wheel and all that it needs, without running the Python that it is for."""
    platforms = [f"--platform=manylinux_{glibc}_{architecture}" for glibc in _GLIBCS]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", site, "--only-binary=:all:"]
    command = [*pip, *platforms, f"--python-version={version}", wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def reducing_workers(python: Path, site: Path, folder: Path, **variables: str) -> list[str]:
    """Says of each of two workers of SCRIPT on which processor and Python it ran, and its rank.

    Starts them itself: `coarse run` adopts orphans, which QEMU in user mode does not offer.
    """
    store = folder / "store"
    store.mkdir()
    shared = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(site), **variables}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    workers = [
        subprocess.Popen(
            [python, SCRIPT, store],
            cwd=folder,
            env={**shared, **sizes, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [worker.communicate(timeout=900)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    return sorted(re.findall(r"\w+ 3\.\d+ \d", "".join(said)))

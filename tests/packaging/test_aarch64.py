"""The wheel for aarch64, compiled on another processor, installs and reduces under emulation (QEMU in user mode).

Needs root nowhere: apt downloads an aarch64 Python into a folder of the test. `apt install qemu-user
g++-aarch64-linux-gnu` brings the rest.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
ALL_REDUCE = """
import platform
import sys

import numpy as np

from coarse.env import WorkerIdentity
from coarse.session import Session
from coarse.store import DirectoryStore

identity = WorkerIdentity.from_environment()
with Session.join(identity=identity, store=DirectoryStore(sys.argv[1])) as session:
    for dtype in (np.float32, np.float16, np.int64):
        values = np.arange(10_000).astype(dtype) % 100 * 2**identity.rank
        session.all_reduce(values)
        assert (values == np.arange(10_000) % 100 * 3).all()
    print(platform.machine(), identity.rank, flush=True)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(platform.machine() == "aarch64", reason="this processor needs no emulation"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("apt install g++-aarch64-linux-gnu")
    out = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, ROOT / "packaging" / "wheels.py", "--arch", "aarch64", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    (built,) = out.glob("*manylinux_2_28_aarch64.whl")
    return built


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A command that runs an aarch64 Python of this one's version; so do the processes that it starts."""
    for command in ("qemu-aarch64", "apt-get", "dpkg-deb"):
        if shutil.which(command) is None:
            pytest.skip(f"{command} is missing (apt install qemu-user)")
    folder = tmp_path_factory.mktemp("aarch64")
    for package in downloaded(folder, "python3", "libstdc++6"):
        subprocess.run(["dpkg-deb", "--extract", package, folder / "root"], check=True)
    if not (folder / "root/usr/bin" / PYTHON).exists():
        pytest.skip(f"this distribution has no {PYTHON}")
    command = folder / PYTHON
    command.write_text(
        f'#!/bin/sh\nexec qemu-aarch64 -L {folder}/root -0 "$0" {folder}/root/usr/bin/{PYTHON} "$@"\n'
    )
    command.chmod(0o755)
    return command


def downloaded(folder: Path, *packages: str) -> list[Path]:
    """Debian's packages for arm64 with all that they depend on, without a trace in this system's own apt."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
    }
    apt = ["apt-get", "--quiet=2", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*apt, "update"], check=True, timeout=300)
    install = ["install", "--yes", "--download-only", "--no-install-recommends", *packages]
    subprocess.run([*apt, *install], check=True, timeout=300)
    return sorted((folder / "cache/archives").glob("*.deb"))


def test_two_emulated_workers_reduce_arrays(wheel: Path, emulated: Path, tmp_path: Path) -> None:
    site, store, script = (tmp_path / name for name in ("site", "store", "script.py"))
    platforms = [f"--platform=manylinux_{each}_aarch64" for each in ("2_28", "2_27", "2_17")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", site, "--only-binary=:all:"]
    version = f"--python-version={sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([*pip, *platforms, version, wheel], check=True, timeout=300)
    store.mkdir()
    script.write_text(ALL_REDUCE)
    done = subprocess.run(
        [emulated, "-m", "coarse", "run", "-n", "2", script, store],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONHOME": "/usr",  # in the emulated root
            "PYTHONPATH": str(site),
            "COARSE_TIMEOUT_S": "600",
            "COARSE_HEARTBEAT_S": "0",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"aarch64 (\d)", done.stdout)) == ["0", "1"]

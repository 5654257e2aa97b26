"""The wheel for aarch64, compiled on another processor, installs and reduces under emulation (QEMU in user mode).

Needs root nowhere: apt downloads an aarch64 Python into a folder of the test. `apt install qemu-user
g++-aarch64-linux-gnu` brings the rest.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "packaging"))

import debian  # noqa: E402
from foreign_python import install, reducing_workers  # noqa: E402

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PATIENT = {"COARSE_TIMEOUT_S": "600", "COARSE_HEARTBEAT_S": "0"}

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
    apt = debian.Apt.of(folder / "apt", "arm64")
    root, command = folder / "root", folder / f"python{VERSION}"
    debian.extract(apt.download_with_dependencies("python3", "libstdc++6"), root)
    if not (root / "usr/bin" / command.name).exists():
        pytest.skip(f"this distribution has no Python {VERSION}")
    starts = f'exec qemu-aarch64 -L {root} -0 "$0" {root}/usr/bin/{command.name} "$@"'
    command.write_text(f"#!/bin/sh\nexport PYTHONHOME=/usr\n{starts}\n")  # /usr of the emulated root
    command.chmod(0o755)
    return command


def test_two_emulated_workers_reduce_arrays(wheel: Path, emulated: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(wheel, site, version=VERSION, architecture="aarch64")
    said = reducing_workers(emulated, site, tmp_path, **PATIENT)
    assert said == [f"aarch64 {VERSION} 0", f"aarch64 {VERSION} 1"]

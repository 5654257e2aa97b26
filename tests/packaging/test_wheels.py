"""The wheel of packaging/wheels.py: old symbols alone, and training in an environment without a compiler.

Compiling takes minutes of both cores, so that all tests share one wheel.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "torch_digits.py"

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, ROOT / "packaging" / "wheels.py", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1400)
    assert done.returncode == 0, done.stderr[-4000:]
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_names_its_platform_and_has_all_files(wheel):
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(
        rf"coarse_train-[\d.]+-{python}-{python}-(\w+\.)?manylinux_2_28_{platform.machine()}\.whl", wheel.name
    )
    tracked = subprocess.run(
        ["git", "ls-files", "coarse"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    modules = {name for name in tracked if name.endswith((".py", ".toml", ".json", ".pyi"))}
    with zipfile.ZipFile(wheel) as packed:
        assert modules - set(packed.namelist()) == set()


def test_digits_train_by_the_wheel_where_no_compiler_is(wheel, tmp_path):
    """The environment sees PyTorch and scikit-learn of this one, but neither its COARSE nor any other command."""
    venv.create(tmp_path / "bare", with_pip=True)
    bare = tmp_path / "bare" / "bin"
    purelib = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "bare")})
    Path(purelib, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {"PATH": str(bare), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*command: str | Path) -> str:
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=400
        ).stdout

    run(bare / "pip", "install", "--no-deps", "--no-index", wheel)
    used = run(bare / "python", "-c", "import coarse.kernels._native as native; print(native.__file__)")
    assert used.startswith(os.fspath(tmp_path))
    said = run(bare / "coarse", "run", "-n", "2", DIGITS, "--epochs", "8")
    (accuracy,) = re.findall(r"test accuracy (\d+\.\d+)%", said)
    assert float(accuracy) > 90

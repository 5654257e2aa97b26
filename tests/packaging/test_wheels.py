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
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GROUP = """
import torch
import torch.distributed as dist

dist.init_process_group("coarse")
rank = dist.get_rank()
total = torch.full((100_000,), 2.0**rank)
dist.all_reduce(total)
assert total.eq(3).all()
message = torch.arange(7.0) if rank == 0 else torch.empty(7)
(dist.send if rank == 0 else dist.recv)(message, 1 - rank)
assert message.equal(torch.arange(7.0))
try:
    dist.all_reduce(torch.ones(3 + rank))
except dist.DistBackendError as error:
    print(f"rank {rank} hears of {error}")
dist.barrier()
dist.destroy_process_group()
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, ROOT / "packaging" / "wheels.py", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1400)
    assert done.returncode == 0, done.stderr[-4000:]
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def run_bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command where the wheel is installed.

    That environment sees the frameworks and scikit-learn of this one, but neither its COARSE nor any other command.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(purelib, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {"PATH": str(folder / "bin"), "HOME": str(folder), "OMP_NUM_THREADS": "1"}

    def run(command: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [folder / "bin" / command, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    run("pip", "install", "--no-deps", "--no-index", wheel)
    used = run("python", "-c", "import coarse.kernels._native as native; print(native.__file__)").stdout
    assert used.startswith(os.fspath(folder))
    return run


def test_the_wheel_names_its_platform_and_has_all_files(wheel: Path) -> None:
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


def test_digits_train_by_the_wheel_where_no_compiler_is(run_bare: Run) -> None:
    said = run_bare("coarse", "run", "-n", "2", EXAMPLES / "torch_digits.py", "--epochs", "8").stdout
    (accuracy,) = re.findall(r"test accuracy (\d+\.\d+)%", said)
    assert float(accuracy) > 90


def test_a_process_group_needs_no_compiler(run_bare: Run) -> None:
    done = run_bare("coarse", "run", "-n", "2", EXAMPLES / "process_group_coarse.py", "--epochs", "4")
    (accuracy,) = re.findall(r"right answers (\d+\.\d+)%", done.stdout)
    assert float(accuracy) > 80
    assert "compil" not in done.stderr


def test_messages_and_errors_of_a_process_group_pass_between_its_modules(
    run_bare: Run, tmp_path: Path
) -> None:
    """The native module and the torch backend are compiled apart, and exchange C++ objects and exceptions."""
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    said = run_bare("coarse", "run", "-n", "2", script).stdout
    assert set(re.findall(r"rank (\d) hears of coarse: .*float32", said)) == {"0", "1"}


@pytest.mark.slow
def test_keras_needs_no_compiler(run_bare: Run) -> None:
    pytest.importorskip("tensorflow")
    done = run_bare("coarse", "run", "-n", "2", EXAMPLES / "tf_digits.py", "--epochs", "4")
    accuracies = re.findall(r"accuracy (\d+\.\d+) %", done.stdout)
    assert len(accuracies) == 2
    assert all(float(accuracy) > 80 for accuracy in accuracies)
    assert "through Python" not in done.stderr

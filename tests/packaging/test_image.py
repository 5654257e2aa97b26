"""The image for training, built without Docker: buildah with chroot isolation, on a base by debootstrap.

It trains, and contains nothing that training does not need. Needs root, and `apt install buildah debootstrap`. pip
and apt inside take what they take outside.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
IMAGE = "coarse-training"

Buildah = Callable[..., str]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("buildah", "debootstrap", "apt-get"))),
        reason="needs root, buildah and debootstrap",
    ),
]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Buildah:
    """Runs a buildah whose images and containers are in a folder of this test; returns what it prints."""
    folder = tmp_path_factory.mktemp("buildah")
    storage = ["--root", folder / "storage", "--runroot", folder / "run", "--storage-driver", "vfs"]

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            ["buildah", *storage, *arguments], capture_output=True, text=True, check=False, timeout=3000
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.strip()

    return run


@pytest.fixture(scope="module")
def base(buildah: Buildah) -> str:
    """An image of this distribution with its essential packages."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    release = re.findall(r'^VERSION_CODENAME="?(\w+)', Path("/etc/os-release").read_text(), re.MULTILINE)[0]
    (mirror, *_) = re.findall(rf"^{release} (\S+)$", listed, re.MULTILINE)
    container = buildah("from", "scratch")
    command = ["debootstrap", "--variant=minbase", release, buildah("mount", container), mirror]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:]
    buildah("commit", "--rm", container, "localhost/base")
    return "localhost/base"


@pytest.fixture(scope="module")
def container(buildah: Buildah, base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A container of the image that docker/Dockerfile describes."""
    mounts = [f"--volume={path}:{inside}:ro" for path, inside in pip_files(tmp_path_factory.mktemp("pip"))]
    buildah(
        "build",
        *("--isolation=chroot", "--format=docker", f"--target={IMAGE.split('-')[1]}", f"--tag={IMAGE}"),
        *(f"--build-arg=BASE={base}", "--build-arg=TORCH_INDEX=", *mounts),
        *(f"--ignorefile={DOCKER}/Dockerfile.dockerignore", f"--file={DOCKER}/Dockerfile", ROOT),
    )
    name = buildah("from", "--isolation=chroot", IMAGE)
    yield name
    buildah("rm", name)


def settings_of_pip() -> dict[str, str]:
    """pip's settings here, by name: those of files, and those of the environment over them."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"^(global|:env:)\.([\w-]+)=('.*')$", listed, re.MULTILINE)
    return {name: ast.literal_eval(value) for _, name, value in sorted(found, reverse=True)}


def pip_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """What pip in the image reads in order to do as pip here: its settings, and the local files that they name."""
    settings = settings_of_pip()
    for name, value in settings.items():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                settings[name] = settings[name].replace(os.fspath(path), f"/outside{path}")
                own = path.parent if "://" in word else path  # an index refers to files beside its folder
                yield own, f"/outside{own}"
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    yield file, "/etc/pip.conf"


@pytest.fixture(scope="module")
def files(buildah: Buildah, container: str) -> set[Path]:
    """All files of the image, as they are named inside, without the folders on which pip_files() were mounted."""
    root = Path(buildah("mount", container))
    found = {Path("/", path.relative_to(root)) for path in root.rglob("*")}
    return {path for path in found if not path.is_relative_to("/outside")}


def test_digits_train_in_the_image(buildah: Buildah, container: str) -> None:
    said = buildah(
        "run", container, "--", "coarse", "run", "-n", "2", "examples/torch_digits.py", "--epochs", "8"
    )
    (accuracy,) = re.findall(r"test accuracy (\d+\.\d+)%", said)
    assert float(accuracy) > 90


def test_a_process_group_trains_in_the_image(buildah: Buildah, container: str) -> None:
    script = "examples/process_group_coarse.py"
    said = buildah("run", container, "--", "coarse", "run", "-n", "2", script, "--epochs", "4")
    (accuracy,) = re.findall(r"right answers (\d+\.\d+)%", said)
    assert float(accuracy) > 80


def test_the_image_has_no_tools(files: set[Path]) -> None:
    tools = re.compile(r"([\w-]+-)?(gcc|g\+\+|cc|c\+\+|clang|ld|ar|make|cmake|zig|pip)(-?[\d.]+)?")
    assert {path for path in files if path.parent.name == "bin" and tools.fullmatch(path.name)} == set()
    assert {path for path in files if path.name in ("Python.h", "pip", "ziglang")} == set()


def test_the_image_has_no_caches_and_no_tests_of_coarse(files: set[Path]) -> None:
    assert {path for path in files if path.name == ".cache" or path.match("/var/lib/apt/lists/*_*")} == set()
    assert not any(path.match("/coarse") or path.match("/training/tests") for path in files)
    assert Path("/training/examples/torch_digits.py") in files

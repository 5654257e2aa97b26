"""Wheels for other Pythons than the running one: their headers, and, marked slow, a job of two workers under each."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "packaging"))

import debian  # noqa: E402
import pythons  # noqa: E402
from foreign_python import install, reducing_workers  # noqa: E402
from toolchain import ToolchainError  # noqa: E402

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHERS = [version for version in pythons.SUPPORTED if version != VERSION]


def test_a_version_and_an_interpreter_name_the_same_python(tmp_path: Path) -> None:
    by_version, by_command = pythons.find([VERSION, sys.executable], tmp_path)
    assert by_version == by_command
    assert by_version.tag == f"cp{VERSION.replace('.', '')}"
    assert (by_version.include / "Python.h").exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("3.9", r"no wheels for Python 3\.9, only for 3\.10, .*3\.14"),
        ("/no/python3.12", r"/no/python3\.12 is no Python that starts: .*No such file"),
        ("false", "false is no Python that starts"),
    ],
)
def test_what_is_no_python_is_named(tmp_path: Path, word: str, message: str) -> None:
    with pytest.raises(ToolchainError, match=message):
        pythons.find([word], tmp_path)


def test_a_python_without_headers_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(f"""#!/bin/sh\necho '["3.12", "", "{tmp_path}"]'\n""")
    python.chmod(0o755)
    with pytest.raises(ToolchainError, match=f"no headers in {tmp_path}: apt install python3.12-dev"):
        pythons.find([str(python)], tmp_path)


def test_a_copy_of_debians_headers_has_pyconfig_in_its_place(tmp_path: Path) -> None:
    include = tmp_path / "include" / "python3.12"
    for folder, text in (
        (include, "where it is"),
        (include.parent / "x86_64-linux-gnu" / "python3.12", "what it is"),
    ):
        folder.mkdir(parents=True)
        (folder / "pyconfig.h").write_text(text)
    pythons.Python(version="3.12", include=include).copy_headers(tmp_path / "copy")
    assert (tmp_path / "copy" / "pyconfig.h").read_text() == "what it is"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("version", pythons.SUPPORTED)
def test_fetched_headers_are_of_their_version(tmp_path: Path, version: str) -> None:
    python = pythons.Python(version=version, include=pythons.fetched(version, tmp_path))
    python.copy_headers(tmp_path / "copy")
    assert f'#define PY_VERSION              "{version}.' in (tmp_path / "copy" / "patchlevel.h").read_text()
    assert "define SIZEOF_LONG 8" in (tmp_path / "copy" / "pyconfig.h").read_text()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels for all other Pythons."""
    out = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, ROOT / "packaging" / "wheels.py", "--python", *OTHERS, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def debians_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A command that runs the Python of another release of Debian with that release's C library."""
    if shutil.which("apt-get") is None or platform.machine() != "x86_64":
        pytest.skip("this is no Debian on x86-64")
    folder = tmp_path_factory.mktemp("debian")
    apt = debian.Apt.of(folder / "apt", "amd64", suite="testing")
    root, command = folder / "root", folder / "python3.14"
    debian.extract(apt.download_with_dependencies("python3.14", "libstdc++6"), root)
    libraries = f"{root}/usr/lib/x86_64-linux-gnu:{root}/lib/x86_64-linux-gnu"
    loader = f'{root}/usr/lib64/ld-linux-x86-64.so.2 --argv0 "$0" --library-path {libraries}'
    starts = f"export PYTHONHOME={root}/usr\nexec {loader} {root}/usr/bin/{command.name}"
    command.write_text(f'#!/bin/sh\n{starts} "$@"\n')
    command.chmod(0o755)
    return command


def wheel_for(version: str, folder: Path) -> Path:
    tag = pythons.Python(version=version, include=folder).tag
    (wheel,) = folder.glob(f"*-{tag}-{tag}-*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", OTHERS)
def test_a_wheel_has_modules_for_its_python_alone(wheels: Path, version: str) -> None:
    with zipfile.ZipFile(wheel_for(version, wheels)) as packed:
        marks = {mark for name in packed.namelist() for mark in re.findall(r"cpython-(\d+)-.*\.so$", name)}
    assert marks == {version.replace(".", "")}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", OTHERS)
def test_two_workers_reduce_arrays_under_another_python(
    wheels: Path, version: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    site = tmp_path / "site"
    try:
        python = Path(pythons.interpreter(version))
    except ToolchainError as error:
        if version != "3.14":
            pytest.skip(str(error))
        python = request.getfixturevalue("debians_python")
    install(wheel_for(version, wheels), site, version=version, architecture=platform.machine())
    said = reducing_workers(python, site, tmp_path)
    assert said == [f"{platform.machine()} {version} 0", f"{platform.machine()} {version} 1"]

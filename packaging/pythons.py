"""The headers of the Pythons for which wheels are built: nothing else of such a Python is needed.

The Python that runs the build compiles and packs for all others. Headers are those of an installed Python. Where
there is none, they come from PyPI, in the wheel of TensorFlow for that Python, or from Debian.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import debian
from toolchain import ToolchainError

SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""Versions of CPython that `all` stands for."""

_TENSORFLOW = "tensorflow-cpu==2.21.*"
_IN_TENSORFLOW = "tensorflow/include/external/local_config_python/python_include/"
_OF_DEBIAN = {"3.14": "testing"}
_ASKED = (
    "import json, sys, sysconfig; "
    "print(json.dumps(['%d.%d' % sys.version_info[:2], sys.abiflags, sysconfig.get_path('include')]))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """A version of CPython for which a wheel is built.

    Args:
        version: Such as "3.12".
        include: The folder of its headers.
    """

    version: str
    include: Path

    @property
    def tag(self) -> str:
        """Its name in names of wheels: "cp312"."""
        return f"cp{self.version.replace('.', '')}"

    def suffix(self, architecture: str) -> str:
        """How names of extension modules end."""
        return f".{self.tag.replace('cp', 'cpython-')}-{architecture}-linux-gnu.so"

    def copy_headers(self, folder: Path) -> None:
        """Replaces a folder by a copy of the headers, which has pyconfig.h in its place: Debian's is elsewhere."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.include, folder)
        for pyconfig in self.include.parent.glob(f"*-linux-gnu/{self.include.name}/pyconfig.h"):
            shutil.copy2(pyconfig, folder)


def find(words: Sequence[str], folder: Path) -> list[Python]:
    """The Pythons that a command line names.

    Args:
        words: Each an interpreter, a version such as "3.12", or "all".
        folder: Where headers that had to be fetched are kept.

    Raises:
        ToolchainError: If one cannot be had; says why, and what to do.
    """
    names = [name for word in words for name in (SUPPORTED if word == "all" else (word,))]
    return [
        _of_version(name, folder) if re.fullmatch(r"3\.\d+", name) else of_interpreter(name) for name in names
    ]


def of_interpreter(command: str) -> Python:
    """The Python that a command starts.

    Raises:
        ToolchainError: If it does not start, has no headers, or is a build with another binary interface.
    """
    try:
        done = subprocess.run([command, "-c", _ASKED], capture_output=True, text=True, check=True)
        version, flags, include = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise ToolchainError(f"{command} is no Python that starts: {error}") from error
    if flags:
        raise ToolchainError(f"{command} is a debug or free-threaded Python, for which there are no wheels")
    if not Path(include, "Python.h").exists():
        raise ToolchainError(f"{command} has no headers in {include}: apt install python{version}-dev")
    return Python(version=version, include=Path(include))


def interpreter(version: str) -> str:
    """The command of an installed Python with headers: this one, one on PATH, or pyenv's.

    Raises:
        ToolchainError: If there is none.
    """
    for command in _candidates(version):
        with contextlib.suppress(ToolchainError):
            if of_interpreter(command).version == version:
                return command
    raise ToolchainError(f"no Python {version} with headers is installed")


def _candidates(version: str) -> Iterator[str]:
    yield sys.executable
    yield f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))


def _of_version(version: str, folder: Path) -> Python:
    if version not in SUPPORTED:
        raise ToolchainError(f"there are no wheels for Python {version}, only for {', '.join(SUPPORTED)}")
    try:
        return of_interpreter(interpreter(version))
    except ToolchainError:
        return Python(version=version, include=fetched(version, folder))


def fetched(version: str, folder: Path) -> Path:
    """A folder with headers that PyPI or Debian has; fetches them once.

    Raises:
        ToolchainError: If they cannot be fetched.
    """
    kept = folder / "fetched" / version
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _fetch(version, Path(scratch)).rename(kept)
    return kept / f"python{version}"


def _fetch(version: str, scratch: Path) -> Path:
    """A folder that contains the headers in a folder such as python3.12."""
    try:
        if version in _OF_DEBIAN:
            return _from_debian(version, scratch)
        return _from_tensorflow(version, scratch)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        raise ToolchainError(
            f"no Python {version} with headers is installed, and its headers cannot be fetched ({said}); "
            f"install it and name it: --python /path/to/python{version}"
        ) from error


def _from_debian(version: str, scratch: Path) -> Path:
    apt = debian.Apt.of(scratch / "apt", "amd64", suite=_OF_DEBIAN[version])
    debian.extract(apt.download(f"libpython{version}-dev"), scratch / "root")
    return scratch / "root/usr/include"


def _from_tensorflow(version: str, scratch: Path) -> Path:
    """Its wheel is 250 MB long, of which the headers are one."""
    tag = f"cp{version.replace('.', '')}"
    chosen = [f"--python-version={version}", "--implementation=cp", f"--abi={tag}"]
    platforms = [f"--platform=manylinux_{each}_x86_64" for each in ("2_17", "2_27", "2_28")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command = [*pip, *chosen, *platforms, "--dest", scratch, _TENSORFLOW]
    subprocess.run(command, capture_output=True, text=True, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(scratch, [name for name in packed.namelist() if name.startswith(_IN_TENSORFLOW)])
    headers = scratch / "include" / f"python{version}"
    headers.parent.mkdir()
    (scratch / _IN_TENSORFLOW).rename(headers)
    return headers.parent

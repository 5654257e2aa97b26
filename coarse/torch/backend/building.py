"""Compiles the C++ backend once for the installed torch, and loads it.

A compiled c10d backend works only with one minor version of torch, one Python and one C++ ABI, so it cannot be part
of a wheel. It is stored in the user's cache folder under a name that depends on all of these and on its sources.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import importlib.machinery
import importlib.util
import logging
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import coarse
from coarse.env import compiler_command

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "native"
_INCLUDE = Path(coarse.__file__).parent / "kernels" / "include"
_INTERFACE = (
    Path("coarse") / "collectives" / "collective.hpp",
    Path("coarse") / "shared_memory" / "forks.hpp",
)
_UNITS = ("c10d_backend.cpp", "sparse.cpp", "messages.cpp", "module.cpp")
_MODULE = "_coarse_c10d"
COMPILE_LIMIT_S = 600.0
"""Time limit for compiling."""


class BuildError(Exception):
    """The C++ backend is not available on this machine."""


def load_extension() -> Any:
    """Returns the C++ backend as a module; the first call on this machine compiles it (about a minute).

    Raises:
        BuildError: If no compiler is installed or it fails; includes its messages. This process does not try again.
    """
    extension = _built_and_loaded()
    if isinstance(extension, BuildError):
        raise extension
    return extension


@cache
def _built_and_loaded() -> Any:
    """Returns the module or the BuildError; cached for all groups, because failing compilers also take time."""
    try:
        return _load(build())
    except BuildError as error:
        return error


def build() -> Path:
    """Returns the path of the compiled backend; compiles it if necessary.

    Several processes may call it at the same time: one compiles, the others wait.

    Raises:
        BuildError: As load_extension().
    """
    target = cache_folder() / f"{_MODULE}-{build_key()}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _compile(target)
    except OSError as error:
        raise BuildError(f"cannot write to {target.parent}: {error}") from error
    return target


def cache_folder() -> Path:
    """The folder of compiled backends."""
    from platformdirs import user_cache_path

    return user_cache_path("coarse") / "torch_backend"


def build_key() -> str:
    """Identifies a compiled backend by torch, C++ ABI, Python, machine, sources and compiler."""
    digest = hashlib.sha256()
    parts = (
        torch.__version__,
        torch.version.git_version,
        torch.compiled_with_cxx11_abi(),
        sys.version,
        _compiler(),
    )
    for part in (*parts, sysconfig.get_platform()):
        digest.update(f"{part}\0".encode())
    for path in (*sorted(_SOURCES.glob("*.[ch]pp")), *(_INCLUDE / header for header in _INTERFACE)):
        digest.update(path.read_bytes())
    return (
        f"torch{torch.__version__.replace('+', '_')}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"
    )


def _compiler() -> tuple[str, ...]:
    """The command of the C++ compiler; empty if there is none."""
    command = compiler_command() or ("g++",)
    if shutil.which(command[0]) is None:
        command = ("c++",)
    return command if shutil.which(command[0]) else ()


def _compile(target: Path) -> None:
    compiler = _compiler()
    if not compiler:
        raise BuildError("there is no C++ compiler (apt install g++, or set CXX)")
    logger.warning("compiling the torch backend for torch %s, once (about a minute)", torch.__version__)
    prefix = f"{target.stem}-build-"
    for left in target.parent.glob(f"{glob.escape(prefix)}*"):  # of killed processes: this one has the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as folder:
        unit, result = Path(folder, "backend.cpp"), Path(folder, "backend.so")
        # torch's headers take nine tenths of the time, so all sources form one unit.
        unit.write_text("".join(f'#include "{name}"\n' for name in _UNITS if (_SOURCES / name).exists()))
        _run([*compiler, *_flags(), str(unit), "-o", str(result), *_libraries()])
        result.replace(target)


def _flags() -> list[str]:
    # Avoids torch.utils.cpp_extension, whose import takes a second and needs setuptools.
    include = Path(torch.__file__).parent / "include"
    system = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    standard = "c++20" if _torch_version() >= (2, 14) else "c++17"
    return [
        *("-O2", f"-std={standard}", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
        f"-DTORCH_EXTENSION_NAME={_MODULE}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in system),
        f"-I{_SOURCES}",
        f"-I{_INCLUDE}",
    ]


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.partition("+")[0].split(".")[:2])


def _libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lc10", "-ltorch_cpu", "-ltorch_python"]


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMPILE_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not compile it: {error}") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(
            f"{command[0]} cannot compile it for torch {torch.__version__}: " + "\n".join(errors[:5])
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    return module

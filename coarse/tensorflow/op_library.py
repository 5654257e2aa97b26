"""The shared library of the TensorFlow ops: the wheel's, or one that is built here once."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import platform
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import platformdirs
import tensorflow as tf

import coarse.kernels
from coarse.errors import CoarseError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("reduce_op.cc")
_PREBUILT = Path(__file__).with_name("prebuilt")
_INCLUDE = Path(coarse.kernels.__file__).with_name("include")
_INTERFACE = _INCLUDE / "coarse" / "client" / "async_reducer_interface.h"
_BUILD_TIMEOUT_S = 300.0


class KernelBuildError(CoarseError):
    """The op could not be built: there is no compiler, or it failed."""


def prebuilt_path() -> Path:
    """Where a wheel has the library for this TensorFlow: the builds of one commit have the same interface."""
    commit = re.sub(r"[^\w.-]", "_", tf.version.GIT_VERSION)
    abi = f"cxx11abi{tf.sysconfig.CXX11_ABI_FLAG}"
    return _PREBUILT / f"reduce_op-tensorflow{tf.__version__}-{commit}-{abi}-{platform.machine()}.so"


def compile_flags() -> list[str]:
    """Inputs of the C++ compiler that compiles the op for the installed TensorFlow."""
    return ["-std=c++17", "-O2", "-w", "-fPIC", f"-I{_INCLUDE}", *tf.sysconfig.get_compile_flags()]


def linked_files() -> list[str]:
    """The libraries of the installed TensorFlow that the op uses."""
    return [str(Path(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2"))]


@functools.cache
def build_library(compiler: str) -> Path:
    """Returns the shared library of the op for this TensorFlow; the first call takes half a minute.

    Args:
        compiler: The C++ compiler.

    Raises:
        KernelBuildError: If it cannot be built.
    """
    command = [*shlex.split(compiler), *compile_flags(), "-shared"]
    links = tf.sysconfig.get_link_flags()
    ingredients = [tf.__version__, *command, *links, SOURCE.read_text(), _INTERFACE.read_text()]
    name = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:24]
    directory = Path(platformdirs.user_cache_dir("coarse"), "tensorflow")
    library = directory / f"reduce_op-{tf.__version__}-{name}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker of the node builds, the others wait for it
        if not library.exists():
            _build(command, links, library)
    return library


def _build(command: Sequence[str], links: Sequence[str], library: Path) -> None:
    """Compiles to a temporary file, which is renamed to `library` when it is complete."""
    logger.info("coarse.tensorflow: building %s", library)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch, library.name)
        try:
            done = subprocess.run(
                [*command, str(SOURCE), "-o", str(built), *links],
                capture_output=True,
                text=True,
                timeout=_BUILD_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelBuildError(f"{error}; install g++ (apt install g++)") from error
        if done.returncode != 0:
            raise KernelBuildError(f"{command[0]} says: {done.stderr.strip()[-500:]}")
        built.replace(library)

"""The TensorFlow op that reduces tensors in graphs; built at first use for the installed TensorFlow."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import platformdirs
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, ops

import coarse.kernels
from coarse.env import compiler_command
from coarse.errors import CoarseError
from coarse.tensorflow.collectives import Collectives

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("reduce_op.cc")
_INCLUDE = Path(coarse.kernels.__file__).with_name("include")
_INTERFACE = _INCLUDE / "coarse" / "client" / "async_reducer_interface.h"
_BUILD_TIMEOUT_S = 300.0
_UNORDERED = frozenset({"CoarseReduce", "CoarseReduceRows", "CoarseUpdate"})
"""Stateful ops that each tf.function may run concurrently, as with TensorFlow's own collectives."""


class KernelBuildError(CoarseError):
    """The op could not be built: there is no compiler, or it failed."""


class ReduceKernel:
    """The op CoarseReduce of one session.

    Args:
        library: Result of load_library().
        collectives: The session's collectives.
        number: Distinguishes the sessions of this process.

    Raises:
        KernelBuildError: If the library belongs to another version of COARSE.
    """

    def __init__(self, library: Path, collectives: Collectives, number: int) -> None:
        auto_control_deps.ASYNC_STATEFUL_OPS |= _UNORDERED
        self._ops = tf.load_op_library(str(library))
        self._functions = ctypes.CDLL(str(library))
        self._number = number
        self._functions.coarse_open_endpoint.argtypes = (ctypes.c_int64, *3 * (ctypes.c_void_p,))
        self._functions.coarse_close_endpoint.argtypes = (ctypes.c_int64,)
        if not self._functions.coarse_open_endpoint(
            number, collectives.interface, collectives.rows_interface, collectives.updates_interface
        ):
            raise KernelBuildError(f"{library} was built for another version of COARSE; remove it")

    def reduce(self, tensors: Sequence[Any], keys: Sequence[str]) -> list[Any]:
        """Reduces tensors in a graph, each separately; all are reduced when the graph has run."""
        results = [
            self._ops.coarse_reduce(contribution=tensor, key=key, endpoint=self._number)
            for tensor, key in zip(tensors, keys, strict=True)
        ]
        with tf.control_dependencies(results):
            self._ops.coarse_sequence()
        return results

    def reduce_rows(self, values: Any, numbers: Any, key: str) -> tuple[Any, Any]:
        """Reduces rows of a table; returns the rows of all workers and their numbers, ascending without repeats."""
        results = self._ops.coarse_reduce_rows(
            contribution=values, rows=numbers, key=key, endpoint=self._number
        )
        if ops.inside_function():
            with tf.control_dependencies(results):
                self._ops.coarse_sequence()
        return results.result, results.result_rows

    def update(self, rule: int, step: Any, updates: Sequence[tuple[str, Any, Any, Any]]) -> list[Any]:
        """Updates parameters; returns each once it is updated.

        Args:
            rule: Number of the update rule.
            step: A scalar of int64; 1 for the first update.
            updates: Key, gradient, current value and coefficients of each parameter.
        """
        results = [
            self._ops.coarse_update(
                gradient=gradient,
                value=value,
                coefficients=coefficients,
                step=step,
                rule=rule,
                key=key,
                endpoint=self._number,
            )
            for key, gradient, value, coefficients in updates
        ]
        if ops.inside_function():
            with tf.control_dependencies(results):
                self._ops.coarse_sequence()
        return results

    def close(self) -> None:
        """Makes running ops fail. Idempotent."""
        self._functions.coarse_close_endpoint(self._number)


def load_kernel(collectives: Collectives, number: int) -> ReduceKernel | None:
    """Returns the op, and builds it if necessary; returns None with a warning if it cannot be built.

    Args:
        collectives: The session's collectives.
        number: Distinguishes the sessions of this process.
    """
    try:
        return ReduceKernel(build_library(" ".join(compiler_command()) or "g++"), collectives, number)
    except (KernelBuildError, OSError, tf.errors.NotFoundError) as error:
        logger.warning(
            "coarse.tensorflow: tensors are reduced through Python, which is slower, because the op cannot be "
            "built: %s",
            error,
        )
        return None


@functools.cache
def build_library(compiler: str) -> Path:
    """Returns the shared library of the op for this TensorFlow; the first call takes half a minute.

    Args:
        compiler: The C++ compiler.

    Raises:
        KernelBuildError: If it cannot be built.
    """
    command = [*shlex.split(compiler), "-std=c++17", "-O2", "-w", "-fPIC", "-shared", f"-I{_INCLUDE}"]
    command += tf.sysconfig.get_compile_flags()
    links = tf.sysconfig.get_link_flags()
    ingredients = [tf.__version__, *command, *links, _SOURCE.read_text(), _INTERFACE.read_text()]
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
                [*command, str(_SOURCE), "-o", str(built), *links],
                capture_output=True,
                text=True,
                timeout=_BUILD_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelBuildError(f"{error}; install g++ (apt install g++)") from error
        if done.returncode != 0:
            raise KernelBuildError(f"{command[0]} says: {done.stderr.strip()[-500:]}")
        built.replace(library)

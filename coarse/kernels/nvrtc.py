"""NVIDIA's run-time compiler, libnvrtc, as it lies in a Python environment or a toolkit: no nvcc, no GPU is needed.

Called directly, not through CuPy: CuPy compiles with -ftz=true whatever one asks for, which flushes subnormals to
zero and so changes bits that the host has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coarse.errors import CoarseError

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_WHEELS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
_TOOLKITS = ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")


class Nvrtc:
    """One libnvrtc.

    Thread safety: any number of threads.

    Args:
        path: Of the library, or a name that the dynamic linker finds.

    Raises:
        OSError: If it cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        self._library: Any = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.path = path
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)
        self._load_builtins()

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path})"

    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that it compiles for, such as 90 for 9.0."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(numbers))
        return tuple(numbers)

    def compile(
        self,
        source: str,
        *,
        name: str,
        architecture: int,
        options: Sequence[str] = (),
        is_virtual: bool = False,
    ) -> bytes:
        """Machine code of a source text, a cubin.

        Args:
            source: CUDA C++.
            name: What messages call it.
            architecture: Compute capability, such as 90 for 9.0.
            options: More of NVRTC's options.
            is_virtual: Whether the result is PTX, a text that one can read.

        Raises:
            CoarseError: If it does not compile; with the compiler's messages.
        """
        program, kind = ctypes.c_void_p(), "compute" if is_virtual else "sm"
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), name.encode(), 0, None, None
            )
        )
        try:
            texts = [option.encode() for option in (f"--gpu-architecture={kind}_{architecture}", *options)]
            with _locale_kept():
                status = self._library.nvrtcCompileProgram(
                    program, len(texts), (ctypes.c_char_p * len(texts))(*texts)
                )
            if status != 0:
                log = self._taken(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise CoarseError(f"{self} cannot compile {name} for sm_{architecture}: {log.strip()}")
            return self._taken(program, "PTX" if is_virtual else "CUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _load_builtins(self) -> None:
        """NVRTC opens another library by its name alone, which the linker finds only where that is loaded already.

        Wheels of 13.0 name no folder to look in (RUNPATH).
        """
        builtins = Path(self.path).with_name("libnvrtc-builtins.so.{}.{}".format(*self.version))
        if builtins.exists():
            ctypes.CDLL(os.fspath(builtins))

    def _taken(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status != 0:
            text = self._library.nvrtcGetErrorString(status).decode()
            raise CoarseError(f"NVRTC of {self.path} failed: {text}")


@contextlib.contextmanager
def _locale_kept() -> Iterator[None]:
    """NVRTC leaves its thread with a locale "C" (uselocale(3)), in which Python takes what others write for ASCII."""
    uselocale: Any = ctypes.CDLL(None).uselocale
    uselocale.restype, uselocale.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = uselocale(None)
    try:
        yield
    finally:
        uselocale(before)


def find_nvrtc() -> list[Nvrtc]:
    """The run-time compilers of this environment and machine, newest first; one per version."""
    found: dict[tuple[int, int], Nvrtc] = {}
    for path in _candidates():
        try:
            nvrtc = Nvrtc(path)
        except OSError:
            continue
        found.setdefault(nvrtc.version, nvrtc)
    return [found[version] for version in sorted(found, reverse=True)]


def _candidates() -> Iterator[str]:
    for soname in _SONAMES:
        for folder in (
            *(Path(entry) / wheel for entry in sys.path for wheel in _WHEELS),
            *map(Path, _TOOLKITS),
        ):
            if (folder / soname).exists():
                yield os.fspath(folder / soname)
        yield soname

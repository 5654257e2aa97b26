"""The kernels of coarse/kernels/cuda, compiled for the GPU at hand by NVRTC: no nvcc is needed.

`batches.cuh` says which kernels there are and what they take. Native code launches them by the handles that
`CudaKernels.function` gives; `CudaKernels.launch` does so from Python.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from coarse.errors import CoarseError
from coarse.kernels import _native
from coarse.kernels.nvrtc import Nvrtc, find_nvrtc

DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8")
"""In the order of the native DType."""

MEASURED_DTYPES = ("float32", "bfloat16", "float16")
"""Of gradients: those of which means are measured, and parameters updated."""

THREADS_PER_BLOCK = 256
"""kThreads of platform.cuh."""

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""For NVRTC. The host's bits: one rounding per operation, none flushed to zero."""

_MAJOR, _MINOR, _COUNT = 75, 76, 16  # CUdevice_attribute: compute capability, multiprocessors
_BLOCKS_PER_MULTIPROCESSOR = 8  # as many as fit with 256 threads each

_SOURCES = Path(__file__).with_name("cuda")
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)

_INSTALL = "pip install 'coarse[cuda]'; a PyTorch for CUDA brings it too"


def kernel_names() -> dict[str, tuple[str, ...]]:
    """The kernels of each source file, by its name without ending."""
    kinds = [f"{op}_{dtype}" for dtype in DTYPES for op in ("sum", "max")]
    return {
        "reduce": tuple(f"reduce_{kind}" for kind in kinds),
        "ring": tuple(f"ring_{kind}" for kind in kinds),
        "measure": tuple(f"measure_{dtype}" for dtype in MEASURED_DTYPES),
        "update": tuple(f"update_{dtype}" for dtype in MEASURED_DTYPES),
        "delay": ("hold_until",),
    }


def source(name: str) -> str:
    """One source file with all that it includes, so that it compiles, and is cached, by its text alone."""
    return "".join(_expand(f"{name}.cu", set()))


def _expand(name: str, seen: set[str]) -> Iterator[str]:
    if name in seen:
        return
    seen.add(name)
    text = (_SOURCES / name).read_text().replace("#pragma once\n", "\n")
    position, line = 0, 1
    yield f'#line 1 "{name}"\n'
    for match in _INCLUDE.finditer(text):
        line += text.count("\n", position, match.end())
        yield text[position : match.start()]
        yield from _expand(match.group(1), seen)
        yield f'#line {line} "{name}"\n'
        position = match.end()
    yield text[position:]


class CudaKernels:
    """All kernels for one GPU.

    A source file is compiled when one of its kernels is first asked for; the machine code is kept in the user's cache
    folder (XDG_CACHE_HOME).

    Thread safety: one caller at a time. Handles are valid in the primary context of the GPU while this exists.

    Args:
        device: Ordinal of the GPU, as CUDA counts them in this process.

    Raises:
        CudaError: If there is no driver, or no such GPU.
        CoarseError: If there is no NVRTC that goes with the driver; says what to install.
    """

    def __init__(self, device: int = 0) -> None:
        self.context = _native.CudaContext(device)
        self.driver_version = _driver_version()
        """Of CUDA, that the driver supports."""
        attributes = [_native.cuda_device_attribute(device, number) for number in (_MAJOR, _MINOR, _COUNT)]
        self.architecture = 10 * attributes[0] + attributes[1]
        """Compute capability, such as 90 for 9.0."""
        self.most_blocks = attributes[2] * _BLOCKS_PER_MULTIPROCESSOR
        """Blocks beyond which a grid gains nothing."""
        self._compilers = usable_compilers(find_nvrtc(), self.driver_version)
        self._modules: dict[str, int] = {}

    def function(self, name: str) -> int:
        """The CUfunction of a kernel, as an address.

        Raises:
            ValueError: If there is no such kernel.
            CoarseError: If it cannot be compiled for this GPU.
            CudaError: If it cannot be loaded.
        """
        file = next((file for file, names in kernel_names().items() if name in names), None)
        if file is None:
            raise ValueError(f"there is no kernel {name!r}; batches.cuh lists them")
        if file not in self._modules:
            self._modules[file] = self.context.load_module(compiled(file, self._compilers, self.architecture))
        return self.context.find_kernel(self._modules[file], name)

    def launch(self, name: str, batch: bytes, *, num_tiles: int, stream: int) -> None:
        """Launches a kernel that takes one batch.

        Args:
            name: Of the kernel.
            batch: Of native cuda_reduce_batch() or cuda_update_batch(), with what a MeasureBatch adds behind it.
            num_tiles: Of the batch.
            stream: A CUstream as an address.

        Raises:
            CudaError: If CUDA refuses.
        """
        num_blocks = min(num_tiles, self.most_blocks)
        if num_blocks > 0:
            self.context.launch(self.function(name), num_blocks, THREADS_PER_BLOCK, stream, [batch])


def describe_gpus() -> tuple[str, str]:
    """GPUs that CUDA finds, by the names that memory devices have, and what is missing for them to be such.

    Returns:
        Both as people read them; "" for none, and for nothing.
    """
    if _native.cuda_unavailable_reason():
        return "", ""
    gpus = [f"cuda:{gpu} ({_native.cuda_device_name(gpu)})" for gpu in range(_native.cuda_num_devices())]
    try:
        usable_compilers(find_nvrtc(), _driver_version())
    except CoarseError as error:
        return ", ".join(gpus), str(error)
    return ", ".join(gpus), ""


def _driver_version() -> tuple[int, int]:
    return divmod(_native.cuda_driver_version() // 10, 100)


def usable_compilers(found: list[Nvrtc], driver_version: tuple[int, int]) -> list[Nvrtc]:
    """Those whose machine code a driver of this CUDA version loads, of no newer major version; the newest first.

    Raises:
        CoarseError: If there is none; says what to install.
    """
    newest_first = sorted(found, key=lambda nvrtc: nvrtc.version, reverse=True)
    if usable := [nvrtc for nvrtc in newest_first if nvrtc.version[0] <= driver_version[0]]:
        return usable
    version = ".".join(map(str, driver_version))
    if not found:
        raise CoarseError(f"GPU memory devices need NVRTC, which was not found: {_INSTALL}")
    raise CoarseError(
        f"the driver supports CUDA {version}, which is older than {' and '.join(map(str, found))}: install "
        f"nvidia-cuda-nvrtc-cu{driver_version[0]}, or a newer driver"
    )


def compiled(file: str, compilers: list[Nvrtc], architecture: int) -> bytes:
    """The machine code of a source file, by the first compiler that still knows the GPU.

    It is taken from the cache, or compiled and then kept there, where there is one.

    Raises:
        CoarseError: If it does not compile.
    """
    for number, nvrtc in enumerate(compilers):
        try:
            return _compiled(file, nvrtc, architecture)
        except CoarseError:
            if number == len(compilers) - 1:
                raise
    raise ValueError("needs a compiler at least")


def _compiled(file: str, nvrtc: Nvrtc, architecture: int) -> bytes:
    text = source(file)
    key = sha256("\0".join((text, *OPTIONS, str(nvrtc.version))).encode()).hexdigest()[:24]
    path = _cache_folder() / f"{file}-sm{architecture}-{key}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    cubin = nvrtc.compile(text, name=f"{file}.cu", architecture=architecture, options=OPTIONS)
    with suppress(OSError):  # then it compiles anew next time
        _keep(path, cubin)
    return cubin


def _keep(path: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _cache_folder() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("coarse") / "cuda"
